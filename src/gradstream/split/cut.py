"""Cuts a torch model into stages: `plan_split`."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn

from gradstream.errors import ConfigError
from gradstream.model.base import Batch, Layout, Slot
from gradstream.model.torch_module import TorchModel
from gradstream.split.balance import contiguous_groups, filled
from gradstream.split.divide import divide, divisible, part_of_piece
from gradstream.split.graph import Form, Graph, Piece, form_of, record
from gradstream.split.plan import DATA, SplitPlan, Stage, Value
from gradstream.split.refusals import storage, where
from gradstream.split.trace import run_node

# ---- seconds -----------------------------------------------------------------------------
# Measures how long each operation of a model takes, one after the other: the whole model is never there.

_TIMES = 3


def seconds_of(graph: Graph, samples: int) -> dict[fx.Node, float]:
    """Seconds of each operation, forward and backward: the least of three, on small random numbers."""
    return {node: _seconds(graph, node, samples) for node in graph.nodes}


def _seconds(graph: Graph, node: fx.Node, samples: int) -> float:
    root = nn.Module()
    if node.op == "call_module":
        root = copy.deepcopy(graph.blueprint.module.get_submodule(str(node.target))).to_empty(device="cpu")
        for tensor in (*root.parameters(), *root.buffers()):
            tensor.detach().copy_(_filled(tensor))
    best = float("inf")
    for _ in range(_TIMES):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: _value(used, samples))
        begin = time.perf_counter()  # noqa: TID251  # arithmetic itself is timed, before a run
        result = root(*args, **kwargs) if node.op == "call_module" else run_node(node, root, args, kwargs)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            torch.autograd.backward(result, torch.ones_like(result))
        best = min(best, time.perf_counter() - begin)  # noqa: TID251
    return best


def _value(node: fx.Node, samples: int) -> Any:
    first = node.meta["values"][0]
    if not isinstance(first, torch.Tensor):
        return first
    form = form_of(node)
    shape = list(first.shape)
    if form is not None and form.axis is not None:
        shape[form.axis] = form.shape[form.axis] * samples
    value = _filled(torch.empty(shape, dtype=first.dtype, device="meta"))
    return value.requires_grad_() * 1 if value.is_floating_point() else value


def _filled(like: torch.Tensor) -> torch.Tensor:
    """Small random numbers, or zeros where they have to be whole."""
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=like.dtype) * 0.1
    return torch.zeros(like.shape, dtype=like.dtype)


# ---- chain -------------------------------------------------------------------------------
# The operations of a model in their order, and where the order can be cut into contiguous groups.


class OperationChain:
    """A sequence of operations of which groups can be made; between two layers a cut is where least would travel.

    Args:
        nodes: the operations in order, without pieces of divided layers.
        weights: what to balance, of each operation.

    Attributes:
        barred: positions before which no cut is possible, each with the reason.
    """

    def __init__(self, nodes: Sequence[fx.Node], weights: Mapping[fx.Node, float]) -> None:
        self._nodes = nodes
        self.barred = _barred(nodes)
        costs = _cut_costs(nodes)
        self._starts, self._costs = (
            [0],
            [0.0],
        )  # of runs that stay together, with at most one weighted layer each
        last: int | None = None
        for index, node in enumerate(nodes):
            if not weights[node]:
                continue
            free = [
                cut for cut in range(index if last is None else last + 1, index + 1) if cut not in self.barred
            ]
            if last is not None and free:
                self._starts.append(min(reversed(free), key=costs.__getitem__))
                self._costs.append(costs[self._starts[-1]])
            last = index
        self._ends = [*self._starts[1:], len(nodes)]
        self._weights = [
            sum(weights[node] for node in nodes[start:end])
            for start, end in zip(self._starts, self._ends, strict=True)
        ]

    @property
    def most_groups(self) -> int:
        """How many groups there can be."""
        return len(self._starts)

    def place(self, groups: int) -> dict[fx.Node, int]:
        """The group of each operation. Raises ConfigError if there are too few layers."""
        if groups > self.most_groups:
            raise ConfigError(
                f"plan_split: the model has {self.most_groups} layers between which it can be cut, expected at least "
                f"one for each of {groups} parts: take fewer parts"
            )
        found = contiguous_groups(self._weights, self._costs, groups)
        return {
            node: group
            for start, end, group in zip(self._starts, self._ends, found, strict=True)
            for node in self._nodes[start:end]
        }

    def group_weights(self, groups: int) -> list[float]:
        """The weight of each group."""
        found = contiguous_groups(self._weights, self._costs, groups)
        return [
            sum(weight for weight, own in zip(self._weights, found, strict=True) if own == group)
            for group in range(groups)
        ]


def _barred(nodes: Sequence[fx.Node]) -> dict[int, str]:
    barred: dict[int, str] = {}
    created: dict[int, int] = {}
    order = {node: index for index, node in enumerate(nodes)}
    for node, index in order.items():
        first = node.meta["values"][0]
        if isinstance(first, torch.Tensor):
            created.setdefault(storage(first), index)
        for written in node.meta["writes"]:
            for cut in range(created.setdefault(written, index) + 1, index + 1):
                barred.setdefault(cut, f"{where(node)} writes in place what was made before the cut")
        if form_of(node) is None:
            for cut in range(index + 1, max(order.get(user, index) for user in [node, *node.users]) + 1):
                barred.setdefault(cut, f"the result of {where(node)} has no one axis that is the samples")
    return barred


def _cut_costs(nodes: Sequence[fx.Node]) -> list[float]:
    """Bytes for each sample that a cut before each position would carry."""
    order = {node: index for index, node in enumerate(nodes)}
    costs = [0.0] * (len(nodes) + 1)
    for node, index in order.items():
        form = form_of(node)
        users = [len(nodes) if user.op == "output" else order.get(user, index) for user in node.users]
        for cut in range(index + 1, max(users, default=index) + 1):
            costs[cut] += 0 if form is None else math.prod(form.shape) * form.dtype.itemsize
    return costs


# ---- cut ---------------------------------------------------------------------------------

_PARAMETER = "parameter "
_RESERVED = ("inputs", "loss", "outputs", "targets")


@dataclass(frozen=True, slots=True)
class TorchPlan(SplitPlan):
    """The plan of a split torch model, with the graph from which `StageModel` computes.

    Args:
        graph: the recorded model.
        nodes: the operations of each stage, in order.
        pieces: the trained tensors of each stage, in the order of its layout.
        forms: how each value travels.
    """

    graph: Graph = field(repr=False, compare=False)
    nodes: tuple[tuple[fx.Node, ...], ...] = field(repr=False, compare=False)
    pieces: tuple[tuple[Piece, ...], ...] = field(repr=False, compare=False)
    forms: Mapping[str, Form] = field(repr=False, compare=False)

    @property
    def places(self) -> dict[str, int]:
        """A map with which `plan_split` makes the same plan, if no layer is divided."""
        return {node.name: stage.part for stage in self.stages for node in self.nodes[stage.number]}


def plan_split(
    model: TorchModel,
    example: Batch,
    parts: int,
    *,
    map: Mapping[str, int | Sequence[int]] | None = None,  # noqa: A002  what users call it
    by: Literal["bytes", "seconds"] = "bytes",
    divides: bool = True,
    rounds: int = 1,
) -> TorchPlan:
    """Plans how to divide a model over parts. Each process finds the same plan by itself, unless it measures.

    Args:
        model: the whole model, which is not built.
        example: a minibatch, whose samples have the shapes and dtypes of all later ones.
        parts: number of parts, K >= 1.
        map: the part of each module, by its qualified name; a name counts for all that is inside, unless a
            longer name says otherwise. What it does not name is with the operation before. Several parts
            divide the module, which must be one layer, by columns or rows.
        by: what to balance if there is no map: the bytes of the parameters, or the seconds that each
            operation takes for the example in this process. Others then take the map from `TorchPlan.places`.
        divides: whether wide layers may be divided to balance bytes.
        rounds: number of stages of each part, which go round the parts. Above 1 no layer is divided.

    Raises:
        ConfigError: the model cannot be recorded, or cannot be cut in this way.
    """
    if parts < 1:
        raise ConfigError(f"plan_split: parts is {parts}, expected at least 1")
    graph = record(model, example)
    if map is not None:
        graph, placed = _by_map(graph, parts, map)
    elif rounds > 1:
        groups = OperationChain(graph.nodes, _weights(graph)).place(parts * rounds)
        placed = {node: group % parts for node, group in groups.items()}
    elif by == "bytes":
        graph, placed = _by_weight(graph, parts, divides)
    else:
        placed = OperationChain(graph.nodes, seconds_of(graph, example.num_samples)).place(parts)
    return plan_placed(graph, placed, parts)


def value_name(node: fx.Node) -> str:
    """The name under which a node's result travels."""
    return f"{node.name}'" if node.name in _RESERVED else node.name


def parameter_of(value: str) -> str | None:
    """The parameter that a value of this name is; None if it is another value."""
    return value.removeprefix(_PARAMETER) if value.startswith(_PARAMETER) else None


def _by_map(
    graph: Graph, parts: int, given: Mapping[str, int | Sequence[int]]
) -> tuple[Graph, dict[fx.Node, int]]:
    modules, operations = dict(graph.blueprint.module.named_modules()), {node.name for node in graph.nodes}
    for name, place in given.items():
        if name not in modules and name not in operations:
            raise ConfigError(
                f"plan_split: map names {name!r}, and the model has no such module: see named_modules()"
            )
        places = [place] if isinstance(place, int) else list(place)
        if not places or not all(0 <= part < parts for part in places) or len(set(places)) < len(places):
            raise ConfigError(
                f"plan_split: map[{name!r}] is {place}; expected parts from 0 to {parts - 1}, once each"
            )
        if not isinstance(place, int):
            graph = _divided(graph, name, places, parts)
    placed: dict[fx.Node, int] = {}
    part = 0
    for node in graph.nodes:
        path = node.name if node.name in given else _path(node)
        while path and not isinstance(given.get(path), int):
            path = path.rpartition(".")[0]
        own, named = part_of_piece(node), given.get(path)
        part = part if own is not None or not isinstance(named, int) else named
        placed[node] = part if own is None else own
    chain = [node for node in graph.nodes if part_of_piece(node) is None]
    barred = OperationChain(chain, dict.fromkeys(chain, 0)).barred
    for index, (node, before) in enumerate(zip(chain[1:], chain, strict=False), 1):
        if index in barred and placed[node] != placed[before]:
            raise ConfigError(f"plan_split: map cuts before {where(node)}; {barred[index]}")
    return graph, placed


def _divided(graph: Graph, name: str, places: Sequence[int], parts: int) -> Graph:
    """The graph with a layer divided by columns or rows."""
    chain = [node for node in graph.nodes if f"{_path(node)}.".startswith(f"{name}." if name else "")]
    if len(chain) == 1 and divisible(graph, chain[0]):
        return divide(graph, chain[0], [(part in places) / len(places) for part in range(parts)])
    if not chain:
        raise ConfigError(
            f"plan_split: map[{name!r}] names {len(places)} parts, but the forward pass computes nothing in this "
            "module: leave it out of map"
        )
    raise ConfigError(
        f"plan_split: {where(chain[0])}: map[{name!r}] names {len(places)} parts, and this cannot be divided; "
        "expected one linear layer or convolution, without groups and hooks, padded by zeros, whose weight no other "
        "layer uses"
    )


def _path(node: fx.Node) -> str:
    """Qualified name of the module in which an operation is."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""


def _by_weight(graph: Graph, parts: int, divides: bool) -> tuple[Graph, dict[fx.Node, int]]:
    """Contiguous groups of about equal bytes. Layers of more than 1/parts of all are divided, and fill the parts up."""
    weights = _weights(graph)
    room = graph.layout.elems / parts
    divides = divides and parts > 1
    wide = [node for node in graph.nodes if divides and weights[node] > room and divisible(graph, node)]
    if not wide:
        return graph, OperationChain(graph.nodes, weights).place(parts)
    chain = OperationChain(graph.nodes, {**weights, **dict.fromkeys(wide, 0)})
    # The others continue as few parts as have room for them.
    options = [chain.group_weights(count) for count in range(1, min(parts, chain.most_groups) + 1)]
    others = next((groups for groups in options if max(groups) <= room), options[-1])
    shares = filled([*others, *[0.0] * (parts - len(others))], sum(weights[node] for node in wide))
    for node in wide:
        graph = divide(graph, node, shares)
    pieces = {node: part for node in graph.nodes if (part := part_of_piece(node)) is not None}
    rest = [node for node in graph.nodes if node not in pieces]
    return graph, OperationChain(rest, _weights(graph)).place(len(others)) | pieces


def _weights(graph: Graph) -> dict[fx.Node, int]:
    """How many trained elements each operation is the first to use."""
    slots = {slot.name: slot for slot in graph.layout.slots}
    weights: dict[fx.Node, int] = {}
    counted: set[Piece] = set()
    for node in graph.nodes:
        own = set(graph.tensors_of(node)) - counted
        counted |= own
        weights[node] = sum(math.prod(shape_of(slots[p.name], p)) for p in own if p.name in slots)
    return weights


def plan_placed(graph: Graph, placed: Mapping[fx.Node, int], parts: int) -> TorchPlan:
    """The plan with these operations on these parts."""
    groups: list[list[fx.Node]] = []
    for node in graph.nodes:
        last = groups[-1][-1] if groups else None
        pieces_apart = any(part_of_piece(one) is not None for one in (node, last) if one)
        if last is None or pieces_apart or placed[node] != placed[last]:
            groups.append([])
        groups[-1].append(node)
    _refuse_shared(graph, groups)
    stage_of = {node: number for number, nodes in enumerate(groups) for node in nodes}
    forms = dict(graph.data)
    values = {
        name: Value(name, DATA, form.packed, form.dtype) for name, form in graph.data.items()
    }  # of all that is used; those that no stage uses are dropped below
    trained = _trained(graph)
    owned, borrowed = _owners(graph, groups)
    slots = {slot.name: slot for slot in graph.layout.slots}
    used: list[list[str]] = []
    for number, nodes in enumerate(groups):
        names: dict[str, None] = {}
        for node in (*nodes, graph.output) if number == len(groups) - 1 else nodes:
            for operand in node.all_input_nodes:
                if operand.op == "placeholder":
                    names[str(operand.target)] = None
                elif operand in stage_of and stage_of[operand] != number:
                    name = _carried(operand, stage_of[operand], operand in trained, values, forms)
                    names[name] = None
        for piece, owner in borrowed[number].items():
            name = _PARAMETER + piece.name
            names[name] = None
            forms[name] = Form(slots[piece.name].shape, None, graph.layout.dtype)
            values[name] = Value(name, owner, slots[piece.name].shape, graph.layout.dtype, per_sample=False)
        if number == len(groups) - 1:
            names |= dict.fromkeys(name for name in graph.data if name.partition(".")[0] == "targets")
        used.append(list(names))
    travelling = {name: value for name, value in values.items() if any(name in names for names in used)}
    pieces = tuple(tuple(sorted(own, key=lambda piece: ranges_of(slots[piece.name], piece))) for own in owned)
    stages = tuple(
        Stage(
            number,
            placed[nodes[0]],
            tuple(used[number]),
            tuple(name for name, value in travelling.items() if value.source == number),
            joined(bounds for piece in pieces[number] for bounds in ranges_of(slots[piece.name], piece)),
        )
        for number, nodes in enumerate(groups)
    )
    return TorchPlan(
        parts,
        stages,
        tuple(travelling.values()),
        graph.layout.elems,
        graph,
        tuple(tuple(nodes) for nodes in groups),
        pieces,
        forms,
    )


def _refuse_shared(graph: Graph, groups: Sequence[Sequence[fx.Node]]) -> None:
    """Raises ConfigError for a buffer that one stage changes and another uses."""
    names = {storage(tensor): name for name, tensor in graph.blueprint.module.named_buffers()}
    users: dict[str, set[int]] = {}
    for number, nodes in enumerate(groups):
        for node in nodes:
            for piece in graph.tensors_of(node):
                users.setdefault(piece.name, set()).add(number)
    for node in graph.nodes:
        for name in (names[written] for written in node.meta["writes"] if written in names):
            if len(users[name]) > 1:
                raise ConfigError(
                    f"plan_split: {where(node)}: changes buffer {name!r}, which stages {sorted(users[name])} use; "
                    "expected one stage: put them on one part by a map"
                )


def _carried(
    node: fx.Node, source: int, trained: bool, values: dict[str, Value], forms: dict[str, Form]
) -> str:
    """The name of a node's value, which is entered into `values` and `forms`."""
    form, name = form_of(node), value_name(node)
    if form is None:
        raise ConfigError(
            f"cannot split the model behind {where(node)}: the result would be sent to another part, and only a tensor "
            "with exactly one axis of samples can be sent; name the part of each layer with plan_split(map=...), so "
            "that this layer and the one that uses its result are on one part"
        )
    forms[name] = form
    values[name] = Value(
        name, source, form.packed, form.dtype, per_sample=form.axis is not None, trained=trained
    )
    return name


def _trained(graph: Graph) -> set[fx.Node]:
    """Operations whose results depend on a parameter that is trained."""
    slots = {slot.name for slot in graph.layout.slots}
    found: set[fx.Node] = set()
    for node in graph.nodes:
        learns = any(piece.name in slots for piece in graph.tensors_of(node))
        if node.meta["grad"] and (learns or not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
            found |= {other for other in graph.nodes if _memory(other) in node.meta["writes"]}
    return found


def _memory(node: fx.Node) -> int | None:
    first = node.meta["values"][0]
    return storage(first) if isinstance(first, torch.Tensor) else None


def _owners(
    graph: Graph, groups: Sequence[Sequence[fx.Node]]
) -> tuple[list[set[Piece]], list[dict[Piece, int]]]:
    """(trained tensors of each stage, those that it uses and that an earlier stage has, with that stage)."""
    trained = {slot.name for slot in graph.layout.slots}
    owner: dict[Piece, int] = {}
    borrowed: list[dict[Piece, int]] = [{} for _ in groups]
    for number, nodes in enumerate(groups):
        for node in nodes:
            for piece in graph.tensors_of(node):
                if piece.name in trained and owner.setdefault(piece, number) != number:
                    borrowed[number][piece] = owner[piece]
    used = {piece.name for piece in owner}
    owner |= {Piece(slot.name): len(groups) - 1 for slot in graph.layout.slots if slot.name not in used}
    return [{piece for piece, at in owner.items() if at == number} for number in range(len(groups))], borrowed


def ranges_of(slot: Slot, piece: Piece) -> list[tuple[int, int]]:
    """[start, stop) of a piece in the whole flat vector."""
    if piece.axis is None:
        return [(slot.start, slot.stop)]
    inner = math.prod(slot.shape[piece.axis + 1 :])
    row = slot.shape[piece.axis] * inner
    return [
        (start + piece.start * inner, start + piece.stop * inner)
        for start in range(slot.start, slot.stop, row)
    ]


def joined(ranges: Iterator[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same ranges, adjacent ones joined."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)


def shape_of(slot: Slot, piece: Piece) -> tuple[int, ...]:
    """The shape of a piece."""
    if piece.axis is None:
        return slot.shape
    return (*slot.shape[: piece.axis], piece.stop - piece.start, *slot.shape[piece.axis + 1 :])


def layout_of_stage(plan: TorchPlan, number: int) -> Layout:
    """The layout of a stage's own vector: its ranges, joined."""
    slots = {slot.name: slot for slot in plan.graph.layout.slots}
    tensors = [(piece.name, shape_of(slots[piece.name], piece)) for piece in plan.pieces[number]]
    return Layout.of(tensors, plan.graph.layout.dtype)
