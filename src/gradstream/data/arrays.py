"""Data sets of arrays in memory, or of memory-mapped arrays."""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gradstream.data.base import Ids
from gradstream.errors import DataError
from gradstream.model.base import Batch, Tree, leaves_of, map_leaves

# ---- checksum ----------------------------------------------------------------------------
# Checksums of arrays, by which machines of a run compare their data.

QUICK_BYTES = 16 << 20
WHOLE_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 32


def checksum_of(arrays: Iterable[np.ndarray[Any, Any]], *more: str) -> str:
    """The checksum of arrays: of shapes, dtypes, and bytes in C order, little-endian.

    It reads arrays up to 64 MiB whole. Of larger ones it reads the first block, the last, and 30 blocks between them,
    of 1 MiB each, so that a memory-mapped array of any size takes a tenth of a second. It misses differences
    elsewhere.

    Args:
        arrays: the arrays.
        more: texts that identify the data besides.
    """
    digest = hashlib.sha256(repr(more).encode())
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype.newbyteorder('<').str}".encode())
        for block in _blocks(array):
            if block.dtype.byteorder == ">" or (block.dtype.byteorder == "=" and sys.byteorder == "big"):
                block = block.astype(block.dtype.newbyteorder("<"))
            digest.update(np.ascontiguousarray(block).data)
    return digest.hexdigest()[:32]


def quick_checks(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, str]:
    """A quick checksum of each array, by name, for processes of one machine: shape, dtype and a CRC-32.

    It takes some milliseconds: it reads at most 16 MiB of all arrays together, in evenly spread blocks.
    """
    share_bytes = QUICK_BYTES // max(1, len(arrays))
    checks = {}
    for name, array in arrays.items():
        crc = 0
        for block in _blocks(array, share_bytes, share_bytes // NUM_BLOCKS):
            crc = zlib.crc32(np.ascontiguousarray(block).data, crc)
        checks[name] = f"{array.shape} {array.dtype}, content {crc:08x}"
    return checks


def _blocks(
    array: np.ndarray[Any, Any], whole_bytes: int = WHOLE_BYTES, block_bytes: int = BLOCK_BYTES
) -> Iterable[np.ndarray[Any, Any]]:
    """A small array itself; evenly spread blocks of rows of a large one."""
    if array.nbytes <= whole_bytes or array.ndim == 0:
        return [array]
    rows = max(1, block_bytes * len(array) // array.nbytes)
    starts = np.linspace(0, len(array) - rows, NUM_BLOCKS).astype(int)
    return (array[start : start + rows] for start in starts)


# ---- arrays ------------------------------------------------------------------------------

Array = np.ndarray[Any, Any]


class ArrayDataset:
    """Samples along the first axis of arrays. Made by `from_arrays`, which checks them.

    Args:
        name: name for messages and records.
        inputs: (n, …) training inputs, or a tree of such arrays.
        targets: (n, …) training targets, or a tree of such arrays; None without targets.
        test_inputs: (m, …) held-out inputs; m = 0 without held-out samples.
        test_targets: (m, …) held-out targets.
    """

    def __init__(self, name: str, inputs: Tree, targets: Tree, test_inputs: Tree, test_targets: Tree) -> None:
        self.name = name
        self.inputs = inputs
        self.targets = targets
        self.test_inputs = test_inputs
        self.test_targets = test_targets
        self.num_samples = _length(inputs)
        self.num_test_samples = _length(test_inputs)

    @property
    def checksum(self) -> str:
        """Checksum of all arrays, which machines of a run compare; see `checksum_of`."""
        parts = [self.inputs, self.targets, self.test_inputs, self.test_targets]
        named = [leaf for part in parts if part is not None for leaf in leaves_of(part)]
        return checksum_of([array for _, array in named], "".join(path for path, _ in named))

    @property
    def quick_checks(self) -> dict[str, str]:
        """Quick checksum of each array, which nodes of a machine compare; see `data.arrays.quick_checks`."""
        names = ("inputs", "targets", "test_inputs", "test_targets")
        parts = [(getattr(self, name), name) for name in names]
        return quick_checks(dict(leaf for part in parts if part[0] is not None for leaf in leaves_of(*part)))

    def batch(self, ids: Ids) -> Batch:
        """The training samples with these ids, in this order; copies. Raises DataError for an unknown id."""
        check_ids(ids, self.num_samples, f"training samples of {self.name}")
        return Batch(_rows(self.inputs, ids), _rows(self.targets, ids), len(ids), ids)

    def test_batch(self, ids: Ids) -> Batch:
        """The held-out samples with these ids, in this order; copies. Raises DataError for an unknown id."""
        check_ids(ids, self.num_test_samples, f"test samples of {self.name}")
        return Batch(_rows(self.test_inputs, ids), _rows(self.test_targets, ids), len(ids), ids)

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{'×'.join(map(str, array.shape[1:])) or 'scalar'} {array.dtype}"
            for _, array in leaves_of(self.inputs)
        )
        return f"<{self.name}: {self.num_samples} + {self.num_test_samples} samples, {shapes}>"


def from_arrays(
    inputs: Any,
    targets: Any = None,
    test_inputs: Any = None,
    test_targets: Any = None,
    *,
    name: str = "arrays",
) -> ArrayDataset:
    """A data set from arrays, without a copy: memory-mapped arrays stay on the disk.

    Inputs and targets may be trees: nested dicts and tuples of arrays of the same length. Batches are then trees of the
    same structure. A list becomes an array. For samples of varying length see `from_dataset`.

    Args:
        inputs: (n, …) numbers or booleans; anything that numpy can convert to an array.
        targets: (n, …) targets; None without targets.
        test_inputs: (m, …) held-out inputs, with the structure, shapes and dtypes of `inputs`.
        test_targets: (m, …) held-out targets; needed if both `targets` and `test_inputs` are given.
        name: name for messages and records.

    Raises:
        DataError: there are no samples; lengths, shapes, dtypes or structures do not fit; or an array has objects.
    """
    inputs, targets = _arrays(inputs, "inputs"), _arrays(targets, "targets")
    _check_lengths(inputs, "inputs", targets, "targets")
    if not _length(inputs):
        raise DataError(f"data set {name!r} has no samples: inputs have shape {_first(inputs).shape}")
    if test_inputs is None and test_targets is None:
        return ArrayDataset(name, inputs, targets, _rows(inputs, slice(0)), _rows(targets, slice(0)))
    if test_inputs is None or (test_targets is None) != (targets is None):
        absent = (
            "test_inputs" if test_inputs is None else "test_targets" if test_targets is None else "targets"
        )
        raise DataError(
            f"data set {name!r} lacks {absent}: give both of test_inputs and test_targets, or neither"
        )
    test_inputs = _in_order_of(inputs, _arrays(test_inputs, "test_inputs"))
    test_targets = _in_order_of(targets, _arrays(test_targets, "test_targets"))
    _check_lengths(test_inputs, "test_inputs", test_targets, "test_targets")
    for what, train, test in (("inputs", inputs, test_inputs), ("targets", targets, test_targets)):
        _check_alike(what, train, test)
    return ArrayDataset(name, inputs, targets, test_inputs, test_targets)


def check_ids(ids: Ids, num_samples: int, where: str) -> None:
    """Raises DataError for an id outside [0, num_samples): numpy would count negative ones from the end."""
    if len(ids) and not (ids.min() >= 0 and ids.max() < num_samples):
        raise DataError(
            f"got sample ids from {ids.min()} to {ids.max()}; expected 0 to {num_samples - 1}, since there are "
            f"{num_samples} {where}"
        )


def _arrays(value: Any, what: str) -> Tree:
    """The tree with an array of numbers or booleans for each leaf; None stays None."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        if not value:
            raise DataError(f"{what} are an empty dict; expected a dict of arrays")
        return {key: _arrays(branch, f"{what}[{key!r}]") for key, branch in value.items()}
    if isinstance(value, tuple) and value:
        branches = [_arrays(branch, f"{what}[{index}]") for index, branch in enumerate(value)]
        return type(value)(*branches) if hasattr(value, "_fields") else tuple(branches)
    return _array(value, what)


def _array(value: Any, what: str) -> Array:
    """`value` as an array of numbers or booleans with at least one axis."""
    try:
        array: Array = np.asanyarray(value)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{what} cannot be made into an array ({error}); all samples must have the same shape. For samples of "
            "varying length use gradstream.from_dataset(samples, collate=...)"
        ) from error
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"{what} have dtype {array.dtype}, expected numbers or booleans; "
            "encode text and objects as numbers"
        )
    if not array.ndim:
        raise DataError(f"{what} are a single number; expected samples along the first axis")
    return array


def _in_order_of(like: Tree, tree: Tree) -> Tree:
    """The same tree, with the keys of its dicts in the order of `like`."""
    if isinstance(like, Mapping) and isinstance(tree, Mapping) and like.keys() == tree.keys():
        return {key: _in_order_of(branch, tree[key]) for key, branch in like.items()}
    return tree


def _rows(tree: Tree, rows: Any) -> Tree:
    return None if tree is None else map_leaves(lambda array: array[rows], tree)


def _first(tree: Tree) -> Array:
    array: Array = next(leaf for _, leaf in leaves_of(tree))
    return array


def _length(tree: Tree) -> int:
    return len(_first(tree))


def _check_lengths(inputs: Tree, what: str, targets: Tree, of_targets: str) -> None:
    count = _length(inputs)
    parts = [*leaves_of(inputs, what), *(leaves_of(targets, of_targets) if targets is not None else ())]
    for path, array in parts:
        if len(array) != count:
            raise DataError(
                f"got {count} {what} and {len(array)} {path}; expected equal numbers, one of each per sample"
            )


def _check_alike(what: str, train: Tree, test: Tree) -> None:
    if train is None:
        return
    here, there = dict(leaves_of(train, what)), dict(leaves_of(test, what))
    if list(here) != list(there):
        raise DataError(f"test_{what} have the parts {list(there)}; expected {list(here)}, as in {what}")
    for path, array in here.items():
        other = there[path]
        if array.shape[1:] != other.shape[1:] or array.dtype != other.dtype:
            raise DataError(
                f"samples of test_{path} have shape {other.shape[1:]} and dtype {other.dtype}; expected "
                f"{array.shape[1:]} and {array.dtype}, as in {path}"
            )
