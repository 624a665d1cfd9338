"""Sparse data drawn from a seed, of any size and without a download."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradstream.errors import ConfigError, DataError
from gradstream.sparse.data import CsrTable, SparseDataset, TableSize, from_csr, from_ratings, table_of

# ---- random data -------------------------------------------------------------------------

AT_ONCE = 1 << 14
"""Number of samples that are drawn together."""


def synthetic(
    num_samples: int,
    num_features: int,
    touched: int,
    *,
    num_test_samples: int = 0,
    task: Literal["classes", "numbers"] = "classes",
    skew: float = 0.0,
    noise: float = 0.1,
    seed: int = 0,
) -> SparseDataset:
    """A data set of samples x of norm 1 with `touched` features each, and targets of a hidden function w*·x.

    The samples are drawn when they are first read: in a HOGWILD! run by one worker, in shared memory.

    Args:
        num_samples, num_features: n and d.
        touched: Ω, number of features of each sample. A feature that is drawn twice moves to the next free one.
        num_test_samples: number of held-out samples.
        task: "classes", 1 if w*·x > 0 and 0 otherwise; or "numbers".
        skew: 0 draws all features alike. Otherwise the probability of feature v falls as (v+1)^(-skew); words
            of a language have about 1. Frequent features are spread over the vector.
        noise: share of classes that are inverted; or standard deviation of the noise that is added to numbers.
        seed: seed of all random numbers.

    Raises:
        ConfigError: a number is out of range.
    """
    if min(num_samples, num_features) < 1 or num_test_samples < 0 or not 1 <= touched <= num_features:
        raise ConfigError(
            f"synthetic({num_samples}, {num_features}, {touched}): expected at least 1 sample and 1 feature, and "
            "touched from 1 to the number of features"
        )
    if task not in ("classes", "numbers") or not 0 <= skew < 4 or not 0 <= noise < 10:
        raise ConfigError(
            f"synthetic(task={task!r}, skew={skew}, noise={noise}): expected 'classes' or 'numbers', a "
            "skew from 0 to below 4, noise from 0 to below 10"
        )

    def build() -> tuple[CsrTable, CsrTable]:
        rng = np.random.default_rng(seed)
        truth = rng.standard_normal(num_features, np.float32)
        spread = rng.permutation(num_features).astype(np.int32) if skew else None
        parts = []
        for count in (num_samples, num_test_samples):
            indices = np.empty((count, touched), np.int32)
            values = np.empty((count, touched), np.float32)
            targets = np.empty(count, np.float32)
            for start in range(0, count, AT_ONCE):
                block = slice(start, min(start + AT_ONCE, count))
                indices[block] = _features(rng, len(targets[block]), num_features, touched, skew, spread)
                drawn = rng.standard_normal(indices[block].shape, np.float32)
                values[block] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
                targets[block] = _targets(rng, (values[block] * truth[indices[block]]).sum(1), task, noise)
            parts.append(
                (np.arange(count + 1, dtype=np.int64) * touched, indices.ravel(), values.ravel(), targets)
            )
        return table_of(*parts[0], num_features), table_of(*parts[1], 0)

    return SparseDataset(
        "synthetic",
        num_features,
        build,
        train=TableSize(num_samples, num_samples * touched),
        test=TableSize(num_test_samples, num_test_samples * touched),
        classes=task == "classes",
        checksum=repr((num_samples, num_features, touched, num_test_samples, task, skew, noise, seed)),
    )


def _features(rng: Any, rows: int, d: int, touched: int, skew: float, spread: Any) -> Any:
    """(rows, touched) different numbers below d in each row, ascending."""
    if skew == 0:
        drawn = rng.integers(0, d, (rows, touched))
    elif skew == 1:
        drawn = np.floor((d + 1) ** rng.random((rows, touched))) - 1
    else:  # inverts the distribution function of the continuous analogue
        power = 1 - skew
        drawn = np.floor((1 + rng.random((rows, touched)) * ((d + 1) ** power - 1)) ** (1 / power)) - 1
    drawn = np.sort(np.minimum(drawn.astype(np.int64), d - 1), axis=1)
    # The k-th smallest leaves room for k smaller ones and for all larger ones, so that ties move apart in order.
    ranks = np.arange(touched)
    drawn = np.maximum.accumulate(np.maximum(drawn - ranks, 0), axis=1) + ranks
    drawn = np.minimum(drawn, d - touched + ranks)
    return drawn if spread is None else np.sort(spread[drawn], axis=1)


def _targets(rng: Any, margins: Any, task: str, noise: float) -> Any:
    if task == "numbers":
        return margins + noise * rng.standard_normal(len(margins))
    return (margins > 0) ^ (rng.random(len(margins)) < noise)


def synthetic_ratings(
    shape: tuple[int, int],
    num_entries: int,
    rank: int,
    *,
    noise: float = 0.1,
    num_test_entries: int = 0,
    seed: int = 0,
) -> SparseDataset:
    """A data set of entries of a random matrix of low rank, for `matrix_completion`. An entry may occur twice.

    Args:
        shape: rows and columns of the matrix.
        num_entries: number of known entries.
        rank: rank of the matrix. Its entries have variance 1 plus that of the noise.
        noise: standard deviation of the noise.
        num_test_entries: number of held-out entries.
        seed: seed of all random numbers.
    """
    if min(*shape, num_entries, rank) < 1:
        raise ConfigError(f"synthetic_ratings({shape}, {num_entries}, {rank}): expected numbers from 1")
    rng = np.random.default_rng(seed)
    left, right = (rng.standard_normal((size, rank)) / rank**0.25 for size in shape)

    def entries(count: int) -> tuple[Any, Any, Any]:
        i, j = rng.integers(0, shape[0], count), rng.integers(0, shape[1], count)
        return i, j, (left[i] * right[j]).sum(axis=1) + noise * rng.standard_normal(count)

    known = entries(num_entries)
    return from_ratings(*known, shape, test=entries(num_test_entries) if num_test_entries else None)


# ---- svmlight ----------------------------------------------------------------------------
# Files in the svmlight (libsvm) format: a line is a sample, `target feature:value ... # remark`.


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
