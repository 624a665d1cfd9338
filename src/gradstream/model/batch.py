"""A batch, which a data set gives and a model takes, and the trees that its parts may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Tree = Any
"""A mapping, tuple (named or not) or list of trees, or a leaf: anything else."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples to compute a gradient on.

    Args:
        inputs: an array or tensor, or a tree of them, samples along the first axis. Samples of
            varying length come as a list with one array for each, or padded.
        targets: arrays or tensors of the same kind; None if there are only inputs.
        num_samples: number of samples; 0 where a worker has none in a round.
        ids: the position of each sample in the data set; empty in a stream, whose samples have none.
    """

    inputs: Tree
    targets: Tree
    num_samples: int
    ids: np.ndarray[Any, np.dtype[np.int64]]


def map_leaves(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same tree with `fn(leaf)` in the place of each leaf. Mappings become dicts."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(fn, branch) for key, branch in tree.items()}
    if isinstance(tree, tuple):
        branches = [map_leaves(fn, branch) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)
    if isinstance(tree, list):
        return [map_leaves(fn, branch) for branch in tree]
    return fn(tree)


def leaves_of(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) in order. A path is the Python expression behind the tree's name: "['x'][0]"."""
    if isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from leaves_of(branch, f"{path}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for index, branch in enumerate(tree):
            yield from leaves_of(branch, f"{path}[{index}]")
    else:
        yield path, tree
