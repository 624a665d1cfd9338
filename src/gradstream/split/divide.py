"""Divides wide linear layers and convolutions over parts, by columns or by rows of their weight.

With y = x Wᵀ + b, x of I features and y of O (Shoeybi et al. 2019, "Megatron-LM"); channels of a convolution likewise:

    by columns   part k has some outputs, with their b, and gets all of x; y is the parts' results, joined
    by rows      part k has some inputs, and gets these features of x; y is the parts' results, added, plus b

The bias is in the operation that adds, so it counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812  its usual name

from gradstream.split.graph import Graph, Piece, form_of, ordered
from gradstream.split.trace import SAMPLES

_KINDS: dict[type, Callable[..., torch.Tensor]] = {
    nn.Linear: F.linear,
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}


def divisible(graph: Graph, node: fx.Node) -> bool:
    """Whether an operation is a layer that can be divided: its weight is its own, and its tensors can travel."""
    if node.op != "call_module" or not node.meta["grad"] or len(node.args) != 1:
        return False
    module: Any = graph.blueprint.module.get_submodule(str(node.target))
    if type(module) not in _KINDS or module._forward_hooks or module._forward_pre_hooks:
        return False
    if type(module) is not nn.Linear and (module.groups != 1 or module.padding_mode != "zeros"):
        return False
    pieces = set(graph.tensors_of(node))
    trained = {slot.name for slot in graph.layout.slots}
    shared = any(pieces & set(graph.tensors_of(other)) for other in graph.nodes if other is not node)
    features = module.weight.dim() - 1
    forms = [form_of(end) for end in (node.all_input_nodes[0], node)]
    travels = all(form is not None and form.axis != len(form.shape) - features for form in forms)
    return travels and not shared and all(piece.name in trained for piece in pieces)


def divide(graph: Graph, node: fx.Node, shares: Sequence[float]) -> Graph:
    """The graph with a layer divided over parts, by columns or rows: where less travels.

    Args:
        graph: the recorded model.
        node: the layer; `divisible` is true of it.
        shares: of each part; their sum is 1.
    """
    module: Any = graph.blueprint.module.get_submodule(str(node.target))
    x = node.all_input_nodes[0]
    size_in, size_out = (math.prod(end.meta["values"][0].shape) for end in (x, node))
    back = 1 if x.op == "placeholder" else 2  # times that the input's values travel
    others = sum(share > 0 for share in shares) - 1
    by_columns = others * (back * size_in + 2 * size_out / (others + 1))
    by_rows = others * (back * size_in / (others + 1) + 2 * size_out)
    axis = 0 if by_columns < by_rows else 1
    rank = module.weight.dim() - 2
    bounds = _bounds(module.weight.shape[axis], shares)
    more = [] if rank == 0 else [module.stride, module.padding, module.dilation]
    make, has_bias = Maker(node), module.bias is not None
    slices = [x if axis == 0 else make(torch.narrow, x, -1 - rank, a, b - a) for _, a, b in bounds]
    results = []
    for (part, start, stop), given in zip(bounds, slices, strict=True):
        bias = make.tensor(graph, "bias", 0, start, stop) if has_bias and axis == 0 else None
        weight = make.tensor(graph, "weight", axis, start, stop)
        results.append(make(_KINDS[type(module)], given, weight, bias, *more, part=part))
    if axis == 0:
        joined = make(torch.cat, results, -1 - rank)
    else:
        joined = make(_added, results, make.tensor(graph, "bias") if has_bias else None, rank)
    return make.replaced(graph, joined)


def part_of_piece(node: fx.Node) -> int | None:
    """The part of an operation on a piece of a layer; None for any other."""
    part: int | None = node.meta.get("part")
    return part


def _added(results: Sequence[torch.Tensor], bias: torch.Tensor | None, rank: int) -> torch.Tensor:
    """The sum of the parts' results, in their order, and the bias once."""
    total = results[0]
    for result in results[1:]:
        total = total + result
    return total if bias is None else total + bias.view(-1, *[1] * rank)


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


class Maker:
    """Puts operations into a graph, before the one that they replace."""

    def __init__(self, node: fx.Node) -> None:
        self._node = node

    def __call__(self, target: Any, *args: Any, **meta: Any) -> fx.Node:
        """An operation, and its results.

        Args:
            target: a function.
            args: its arguments; nodes of the graph among them.
            meta: more about it: "part", where it is done on a piece of the layer.
        """
        values = []
        for index in range(len(SAMPLES)):
            given = fx.map_arg(args, lambda used: used.meta["values"][index])  # noqa: B023
            values.append(target(*given))
        return self._put("call_function", target, args, tuple(values), meta)

    def tensor(
        self, graph: Graph, key: str, axis: int | None = None, start: int = 0, stop: int = 0
    ) -> fx.Node:
        """A parameter of the layer, or a piece of it."""
        path = str(self._node.target)
        name = f"{path}.{key}" if path else key
        whole: Any = getattr(graph.blueprint.module.get_submodule(path), key)
        piece = Piece(graph.first[name], axis, start, stop)
        return self._put("get_attr", name, (), (piece.of(whole.detach()),) * len(SAMPLES), {"piece": piece})

    def replaced(self, graph: Graph, result: fx.Node) -> Graph:
        """The graph with `result` in place of the operation."""
        self._node.replace_all_uses_with(result)
        self._node.graph.erase_node(self._node)
        return replace(graph, nodes=ordered(result.graph))

    def _put(self, op: str, target: Any, args: Any, values: Any, meta: dict[str, Any]) -> fx.Node:
        graph = self._node.graph
        with graph.inserting_before(self._node):
            node = graph.create_node(op, target, args)
        node.meta |= {**self._node.meta, "random": False, "writes": set(), "values": values, **meta}
        return node
