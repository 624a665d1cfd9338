"""Trees of arrays: dicts and lists of arrays, or a single array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gradstream.errors import ConfigError

Tree = Any
"""A dict or list of trees, or a leaf: anything else. Tuples are leaves here (shapes, for one)."""

ROOT = "parameters"
"""Name of the array in a tree that is a single array."""


def leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """(name, leaf) in order; names of nested leaves are joined by dots: "hidden.0.weight".

    Raises:
        ConfigError: two leaves share a name.
    """
    seen: set[str] = set()
    for name, leaf in _walk(tree, ()):
        if name in seen:
            raise ConfigError(
                f"parameters: two arrays are named {name!r}, expected different names: names of nested keys are "
                "joined by dots, so do not use dots in the keys"
            )
        seen.add(name)
        yield name, leaf


def rebuild(tree: Tree, leaf: Callable[[str], Any]) -> Tree:
    """A tree of the same structure, with `leaf(name)` in the place of each leaf."""
    return _rebuild(tree, (), leaf)


def _walk(tree: Tree, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    children = _children(tree)
    if children is None:
        yield _name(path), tree
        return
    for key, child in children:
        yield from _walk(child, (*path, key))


def _rebuild(tree: Tree, path: tuple[str, ...], leaf: Callable[[str], Any]) -> Tree:
    if isinstance(tree, dict):
        return {key: _rebuild(child, (*path, str(key)), leaf) for key, child in tree.items()}
    if isinstance(tree, list):
        return [_rebuild(child, (*path, str(index)), leaf) for index, child in enumerate(tree)]
    return leaf(_name(path))


def _children(tree: Tree) -> Iterator[tuple[str, Tree]] | None:
    if isinstance(tree, dict):
        return ((str(key), child) for key, child in tree.items())
    if isinstance(tree, list):
        return ((str(index), child) for index, child in enumerate(tree))
    return None


def _name(path: tuple[str, ...]) -> str:
    return ".".join(path) or ROOT
