"""Divides wide linear layers over parts, by columns or by rows.

With y = x Wᵀ + b, x of I features and y of O (Shoeybi et al. 2019, "Megatron-LM"):

    by columns   part k has rows of W (outputs) and their b, and gets all of x; y is the parts' results, joined
    by rows      part k has columns of W (inputs), and gets its features of x; y is the parts' results, added, plus b

The bias is in the operation that adds, so it counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from gradstream.split.graph import Graph, Piece, form_of, ordered

__all__ = ["divide", "divisible", "part_of_piece"]


def divisible(graph: Graph, node: fx.Node) -> bool:
    """Whether an operation is a linear layer whose weight is its own, between tensors that can travel."""
    if node.op != "call_module" or not node.meta["grad"]:
        return False
    module = graph.blueprint.module.get_submodule(str(node.target))
    if (
        type(module) is not nn.Linear
        or module._forward_hooks
        or module._forward_pre_hooks
        or len(node.args) != 1
    ):
        return False
    pieces = set(graph.tensors_of(node))
    trained = {slot.name for slot in graph.layout.slots}
    shared = any(pieces & set(graph.tensors_of(other)) for other in graph.nodes if other is not node)
    forms = [form_of(end) for end in (node.all_input_nodes[0], node)]
    travels = all(form is not None and form.axis != len(form.shape) - 1 for form in forms)
    return travels and not shared and all(piece.name in trained for piece in pieces)


def divide(graph: Graph, node: fx.Node, shares: Sequence[float]) -> Graph:
    """The graph with a linear layer divided over parts, by columns or rows: where less travels.

    Args:
        graph: the recorded model.
        node: the layer; `divisible` is true of it.
        shares: of each part; their sum is 1.
    """
    module = graph.blueprint.module.get_submodule(str(node.target))
    assert isinstance(module, nn.Linear)
    x = node.all_input_nodes[0]
    back = 1 if x.op == "placeholder" else 2  # times that the input's values travel
    others = sum(share > 0 for share in shares) - 1
    by_columns = others * (back * module.in_features + 2 * module.out_features / (others + 1))
    by_rows = others * (back * module.in_features / (others + 1) + 2 * module.out_features)
    axis = 0 if by_columns < by_rows else 1
    bounds = _bounds(module.weight.shape[axis], shares)
    make = _Maker(node)
    has_bias = module._parameters["bias"] is not None
    results = []
    slices = [x if axis == 0 else make(torch.narrow, x, -1, start, stop - start) for _, start, stop in bounds]
    for (part, start, stop), given in zip(bounds, slices, strict=True):
        operands = [given, make.tensor(graph, "weight", axis, start, stop)]
        if axis == 0 and has_bias:
            operands.append(make.tensor(graph, "bias", 0, start, stop))
        results.append(make(nn.functional.linear, *operands, part=part))
    if axis == 0:
        joined = make(torch.cat, results, -1)
    else:
        joined = make(_added, results, *([make.tensor(graph, "bias")] if has_bias else []))
    node.replace_all_uses_with(joined)
    node.graph.erase_node(node)
    return replace(graph, nodes=ordered(node.graph))


def part_of_piece(node: fx.Node) -> int | None:
    """The part of an operation on a piece of a layer; None for any other."""
    part: int | None = node.meta.get("part")
    return part


def _added(results: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of the parts' results, in their order, and the bias once."""
    total = results[0]
    for result in results[1:]:
        total = total + result
    return total if bias is None else total + bias


def _bounds(length: int, shares: Sequence[float]) -> list[tuple[int, int, int]]:
    """(part, start, stop) of each part that has something of an axis."""
    found, start, done = [], 0, 0.0
    for part, share in enumerate(shares):
        done += share
        stop = length if part == len(shares) - 1 else round(done * length)
        if stop > start:
            found.append((part, start, stop))
        start = max(start, stop)
    return found


class _Maker:
    """Puts operations into a graph, before the one that they replace."""

    def __init__(self, node: fx.Node) -> None:
        self._node = node

    def __call__(self, function: Callable[..., Any], *args: Any, part: int | None = None) -> fx.Node:
        """An operation, and its results."""
        values = (function(*fx.map_arg(args, lambda used: used.meta["values"][index])) for index in range(3))  # noqa: B023
        return self._put(
            "call_function", function, args, tuple(values), {} if part is None else {"part": part}
        )

    def tensor(
        self, graph: Graph, key: str, axis: int | None = None, start: int = 0, stop: int = 0
    ) -> fx.Node:
        """A parameter of the layer, or a piece of it."""
        name = f"{self._node.target}.{key}" if self._node.target else key
        whole: Any = getattr(graph.blueprint.module.get_submodule(str(self._node.target)), key)
        piece = Piece(graph.first[name], axis, start, stop)
        return self._put("get_attr", name, (), (piece.of(whole.detach()),) * 3, {"piece": piece})

    def _put(self, op: str, target: Any, args: Any, values: Any, meta: dict[str, Any]) -> fx.Node:
        graph = self._node.graph
        with graph.inserting_before(self._node):
            node = graph.create_node(op, target, args)
        node.meta |= {**self._node.meta, "random": False, "writes": set(), "values": values, **meta}
        return node
