"""One graph of the two that a module has, in train() and in eval(), if only constants differ."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradstream.errors import ConfigError
from gradstream.split.refusals import where


class ByMode:
    """A constant of the graph that differs between train() and eval()."""

    def __init__(self, train: Any, evaluate: Any) -> None:
        self.train, self.evaluate = train, evaluate

    def of(self, training: bool) -> Any:
        """The constant of one mode."""
        return self.train if training else self.evaluate

    def __repr__(self) -> str:
        return f"{self.train!r} or in eval() {self.evaluate!r}"


def merge(graph: fx.Graph, evaluate: fx.Graph) -> None:
    """Puts constants that differ in eval() into the graph. Raises ConfigError if operations differ."""
    for node, other in zip_longest(graph.nodes, evaluate.nodes):
        if (
            node is None
            or other is None
            or (node.op, node.name, node.target) != (other.op, other.name, other.target)
        ):
            raise _differs(node or other)
        leaves, structure = tree_flatten((node.args, node.kwargs))
        others, other_structure = tree_flatten((other.args, other.kwargs))
        if structure != other_structure:
            raise _differs(node)
        for index, (leaf, other_leaf) in enumerate(zip(leaves, others, strict=True)):
            names = fx.map_arg((leaf, other_leaf), lambda used: used.name)
            if names[0] == names[1]:
                continue
            if isinstance(leaf, fx.Node) or isinstance(other_leaf, fx.Node):
                raise _differs(node)
            leaves[index] = ByMode(leaf, other_leaf)
        if any(isinstance(leaf, ByMode) for leaf in leaves):
            node.args, node.kwargs = tree_unflatten(leaves, structure)


def _differs(node: fx.Node) -> ConfigError:
    return ConfigError(
        f"split: {where(node) if 'where' in node.meta else 'the module'}: computes something else in train() than in "
        "eval(); expected the same operations in both: take modules such as nn.Dropout, or keep the model whole"
    )
