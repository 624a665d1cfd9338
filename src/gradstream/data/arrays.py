"""Data sets that are arrays in memory, or memory-mapped."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradstream.data.base import Ids
from gradstream.data.checksum import checksum_of
from gradstream.errors import DataError
from gradstream.model.batch import Batch

__all__ = ["ArrayDataset", "from_arrays"]

Array = np.ndarray[Any, Any]


class ArrayDataset:
    """Samples along the first axis of arrays. Made by `from_arrays`, which checks them.

    Args:
        name: for messages and records.
        inputs: (n, …) training inputs.
        targets: (n, …) training targets.
        test_inputs: (m, …) held-out inputs; m = 0 where there are none.
        test_targets: (m, …) held-out targets.
    """

    def __init__(
        self, name: str, inputs: Array, targets: Array, test_inputs: Array, test_targets: Array
    ) -> None:
        self.name = name
        self.inputs = inputs
        self.targets = targets
        self.test_inputs = test_inputs
        self.test_targets = test_targets
        self.num_samples = len(inputs)
        self.num_test_samples = len(test_inputs)

    @property
    def checksum(self) -> str:
        """Of all four arrays, see `checksum_of`: machines of one run compare theirs."""
        return checksum_of([self.inputs, self.targets, self.test_inputs, self.test_targets])

    def batch(self, ids: Ids) -> Batch:
        """The training samples with these ids, in this order; copies. Raises DataError for an unknown id."""
        check_ids(ids, self.num_samples, f"training samples of {self.name}")
        return Batch(self.inputs[ids], self.targets[ids], len(ids), ids)

    def test_batch(self, ids: Ids) -> Batch:
        """The held-out samples with these ids, in this order; copies. Raises DataError for an unknown id."""
        check_ids(ids, self.num_test_samples, f"test samples of {self.name}")
        return Batch(self.test_inputs[ids], self.test_targets[ids], len(ids), ids)

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.inputs.shape[1:])) or "scalar"
        counts = f"{self.num_samples} + {self.num_test_samples} samples"
        return f"<{self.name}: {counts}, {shape} {self.inputs.dtype}>"


def from_arrays(
    inputs: Any,
    targets: Any,
    test_inputs: Any = None,
    test_targets: Any = None,
    *,
    name: str = "arrays",
) -> ArrayDataset:
    """A data set from arrays, which are kept as they are: memory-mapped ones stay on disk.

    Args:
        inputs: (n, …) numbers or booleans; anything that numpy takes for an array.
        targets: (n, …) likewise.
        test_inputs: (m, …) held-out inputs, of the shape and dtype of `inputs`.
        test_targets: (m, …) held-out targets. Both or neither.
        name: for messages and records.

    Raises:
        DataError: no samples, lengths, shapes or dtypes that do not fit, or objects in an array.
    """
    inputs, targets = _array(inputs, "inputs"), _array(targets, "targets")
    _check_lengths("inputs", inputs, "targets", targets)
    if not len(inputs):
        raise DataError(f"data set {name!r} has no samples: inputs have shape {inputs.shape}")
    if (test_inputs is None) != (test_targets is None):
        absent = "test_inputs" if test_inputs is None else "test_targets"
        raise DataError(
            f"data set {name!r} lacks {absent}: give both of test_inputs and test_targets, or neither"
        )
    if test_inputs is None:
        return ArrayDataset(name, inputs, targets, inputs[:0], targets[:0])
    test_inputs, test_targets = _array(test_inputs, "test_inputs"), _array(test_targets, "test_targets")
    _check_lengths("test_inputs", test_inputs, "test_targets", test_targets)
    for what, train, test in (("inputs", inputs, test_inputs), ("targets", targets, test_targets)):
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            raise DataError(
                f"test_{what} are samples of shape {test.shape[1:]} and dtype {test.dtype}, "
                f"{what} of {train.shape[1:]} and {train.dtype}; they must be alike"
            )
    return ArrayDataset(name, inputs, targets, test_inputs, test_targets)


def check_ids(ids: Ids, num_samples: int, where: str) -> None:
    """Raises DataError for an id outside [0, num_samples): numpy would count negative ones from the end."""
    if len(ids) and not (ids.min() >= 0 and ids.max() < num_samples):
        raise DataError(f"ids from {ids.min()} to {ids.max()} asked of the {num_samples} {where}")


def _array(value: Any, what: str) -> Array:
    """`value` as an array of numbers or booleans with at least one axis."""
    try:
        array: Array = np.asanyarray(value)
    except (ValueError, TypeError) as error:
        raise DataError(f"{what} are no array ({error}); all samples must have one shape") from error
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"{what} have dtype {array.dtype}, expected numbers or booleans; "
            "encode text and objects as numbers"
        )
    if not array.ndim:
        raise DataError(f"{what} are a single number; expected samples along the first axis")
    return array


def _check_lengths(left: str, a: Array, right: str, b: Array) -> None:
    if len(a) != len(b):
        raise DataError(f"{len(a)} {left} and {len(b)} {right}: every sample needs one of each")
