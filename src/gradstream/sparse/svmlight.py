"""Files in the svmlight (libsvm) format: a line is a sample, `target feature:value ... # remark`."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np

from gradstream.errors import ConfigError, DataError
from gradstream.sparse.data import SparseDataset, from_csr


def read_svmlight(path: str | Path, *, first: int = 1) -> tuple[Any, Any, Any, Any]:
    """Reads the four arrays of `from_csr`: indptr, indices, values, targets. It skips `qid:` entries.

    Args:
        path: a text file.
        first: number of the first feature: 1 as in svmlight, or 0.

    Raises:
        ConfigError: there is no such file.
        DataError: a line is no sample; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    indptr, indices, values, targets = array("q", [0]), array("q"), array("f"), array("f")
    with path.open(errors="backslashreplace") as lines:  # bytes that are no text are no number either
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                targets.append(float(words[0]))
                for word in words[1:]:
                    feature, _, value = word.partition(":")
                    if feature != "qid":
                        indices.append(int(feature) - first)
                        values.append(float(value))
            except (ValueError, OverflowError) as error:
                raise DataError(
                    f"{path}:{number}: {error}; expected a line `target feature:value feature:value ...`"
                ) from error
            if indices and indices[-1] < 0:
                raise DataError(
                    f"{path}:{number}: feature {indices[-1] + first}; expected numbers from {first} on: pass first=0 "
                    "if the features of this file begin at 0"
                )
            indptr.append(len(indices))
    return np.array(indptr), np.array(indices, np.int64), np.array(values), np.array(targets)


def from_svmlight(
    path: str | Path, test: str | Path | None = None, *, first: int = 1, num_features: int | None = None
) -> SparseDataset:
    """A data set from svmlight files; see `read_svmlight` and `from_csr`. Every node of a run reads them.

    If they take long to read, read them once, save the arrays with `numpy.save`, and pass to `from_csr` those
    of `numpy.load(..., mmap_mode="r")`.

    Args:
        path: file of training samples.
        test: file of held-out samples.
        first: see `read_svmlight`.
        num_features: d; None takes the largest feature in either file.
    """
    held_out = None if test is None else read_svmlight(test, first=first)
    train = read_svmlight(path, first=first)
    return from_csr(*train, num_features=num_features, test=held_out, name=Path(path).stem)
