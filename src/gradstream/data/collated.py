"""What users' code calls a batch, as a `Batch`: which part of it is targets, and how many samples it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gradstream.data.base import Ids
from gradstream.errors import DataError
from gradstream.model.batch import Batch, Tree

__all__ = ["NO_IDS", "check_targets", "collated"]

NO_IDS: Ids = np.empty(0, dtype=np.int64)
NO_IDS.flags.writeable = False


def check_targets(targets: str | None) -> None:
    """Raises DataError unless it is a key, or None."""
    if targets is not None and not isinstance(targets, str):
        raise DataError(f"targets={targets!r}: expected the key of the targets in a batch that is a dict")


def collated(
    tree: Tree, targets: str | None, where: str, ids: Ids | None = None, *, lists_are_parts: bool = False
) -> Batch:
    """A batch as a collate function or an iterator gives it.

    Args:
        tree: a `Batch`, taken as it is; or a pair (inputs, targets); or any other tree, which is all
            inputs, but for the entry `targets` of a dict.
        targets: key of the targets where batches are dicts.
        where: for messages: whose batch it is, and which.
        ids: of the samples, where they have some: as many samples as ids. Without them the arrays are
            looked at: as many samples as their first axis is long.
        lists_are_parts: a list has the parts of a sample, as torch's own collate function makes them;
            otherwise it has one entry for each sample, of whatever length.

    Raises:
        DataError: no array in it, no such key, or parts of several lengths.
    """
    if isinstance(tree, Batch):
        return tree
    inputs, held = _parts(tree, targets, where)
    if ids is not None:
        return Batch(inputs, held, len(ids), ids)
    lengths = [*_lengths(inputs, "inputs", lists_are_parts), *_lengths(held, "targets", lists_are_parts)]
    return Batch(inputs, held, _agreed(lengths, inputs, where), NO_IDS)


def _parts(tree: Tree, targets: str | None, where: str) -> tuple[Tree, Tree]:
    if targets is not None:
        if not isinstance(tree, Mapping) or targets not in tree:
            got = f"a dict of {sorted(map(str, tree))}" if isinstance(tree, Mapping) else type(tree).__name__
            raise DataError(f"{where} is {got}; expected a dict with the key {targets!r}, as targets= says")
        return {key: part for key, part in tree.items() if key != targets}, tree[targets]
    if isinstance(tree, tuple | list) and len(tree) == 2:
        return tree[0], tree[1]
    return tree, None


def _lengths(tree: Tree, path: str, lists_are_parts: bool) -> Iterator[tuple[str, int]]:
    """(where, number of samples there) of everything in a tree that tells it."""
    if isinstance(tree, list) and tree and not lists_are_parts:
        yield path, len(tree)
    elif isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from _lengths(branch, f"{path}[{key!r}]", lists_are_parts)
    elif isinstance(tree, tuple | list):
        for index, branch in enumerate(tree):
            yield from _lengths(branch, f"{path}[{index}]", lists_are_parts)
    elif getattr(tree, "shape", ()):
        yield path, len(tree)


def _agreed(lengths: list[tuple[str, int]], inputs: Tree, where: str) -> int:
    if not lengths:
        raise DataError(
            f"{where} has no arrays in it: got {_kind(inputs)}; expected samples along a first axis"
        )
    if len({count for _, count in lengths}) > 1:
        shown = ", ".join(f"{name}: {count}" for name, count in lengths[:6])
        raise DataError(
            f"{where} has parts of several lengths ({shown}); expected one entry per sample in each. "
            "Where they are meant so, yield gradstream.model.Batch(inputs, targets, num_samples, ids)"
        )
    return lengths[0][1]


def _kind(tree: Any) -> str:
    return f"{type(tree).__name__} of {len(tree)}" if isinstance(tree, Mapping | tuple | list) else repr(tree)
