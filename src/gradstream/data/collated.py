"""Turns a user's batch into a `Batch`: finds its targets, and counts its samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gradstream.data.base import Ids
from gradstream.errors import DataError
from gradstream.model.batch import Batch, Tree

NO_IDS: Ids = np.empty(0, dtype=np.int64)
NO_IDS.flags.writeable = False


def check_targets(targets: str | None) -> None:
    """Raises DataError unless it is a key, or None."""
    if targets is not None and not isinstance(targets, str):
        raise DataError(f"targets={targets!r}: expected the key of the targets in a batch that is a dict")


def collated(
    tree: Tree, targets: str | None, where: str, ids: Ids | None = None, *, lists_are_parts: bool = False
) -> Batch:
    """The `Batch` of a user's batch.

    Args:
        tree: a `Batch`, which is returned as it is; a pair (inputs, targets); or another tree, which is all inputs
            except for the entry `targets` of a dict.
        targets: key of the targets if batches are dicts.
        where: name of the batch, for messages.
        ids: ids of the samples; None if they have none. The number of samples is then the length of the first axis.
        lists_are_parts: whether a list has the parts of a sample, as from torch's collate function; otherwise it has an
            entry for each sample, of any length.

    Raises:
        DataError: the tree has no array or no such key, or its parts have different lengths.
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
    """(path, number of samples) of each part of a tree that has a length."""
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
            "If this is intended, yield gradstream.model.Batch(inputs, targets, num_samples, ids)"
        )
    return lengths[0][1]


def _kind(tree: Any) -> str:
    return f"{type(tree).__name__} of {len(tree)}" if isinstance(tree, Mapping | tuple | list) else repr(tree)
