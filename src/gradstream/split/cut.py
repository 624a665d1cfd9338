"""Cuts a torch model into stages: `plan_split`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from gradstream.errors import ConfigError
from gradstream.model.base import Batch, Layout, Slot
from gradstream.model.torch_module import TorchModel
from gradstream.split.divide import divide, divisible, part_of_piece
from gradstream.split.graph import Form, Graph, Piece, form_of, record
from gradstream.split.plan import DATA, SplitPlan, Stage, Value
from gradstream.split.refusals import storage, where

# ---- balance -----------------------------------------------------------------------------
# Cuts a chain of layers into contiguous groups of about equal weight. Pure functions.


def contiguous_groups(weights: Sequence[float], cut_costs: Sequence[float], groups: int) -> list[int]:
    """Cuts a sequence into contiguous groups, none empty, so that the heaviest group is as light as possible.

    Among equal cuts it takes one of low cost. Dynamic programming over (group, end): O(groups · n²).

    Args:
        weights: of the n elements.
        cut_costs: of a cut before each element, in the same order; the first is not used.
        groups: how many, 1 to n.

    Returns:
        The group of each element.
    """
    n = len(weights)
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best = [
        (sums[end], 0.0) for end in range(n + 1)
    ]  # (heaviest group, costs of all cuts) of the first `end`
    starts: list[list[int]] = []
    for group in range(1, groups):
        longer, chosen = [(math.inf, math.inf)] * (n + 1), [0] * (n + 1)
        for end in range(group + 1, n + 1):
            for start in range(group, end):
                heaviest, costs = best[start]
                option = (max(heaviest, sums[end] - sums[start]), costs + cut_costs[start])
                if option < longer[end]:
                    longer[end], chosen[end] = option, start
        best = longer
        starts.append(chosen)
    found, end = [0] * n, n
    for group in range(groups - 1, 0, -1):
        start = starts[group - 1][end]
        found[start:end] = [group] * (end - start)
        end = start
    return found


def filled(weights: Sequence[float], more: float) -> list[float]:
    """Divides a further weight, so that the heaviest is as light as possible: as water fills a vessel.

    Args:
        weights: that are there.
        more: the weight to divide, > 0.

    Returns:
        The share of each, of a sum of 1.
    """
    ascending = sorted(weights)
    for count in range(len(ascending), 0, -1):
        level = (more + sum(ascending[:count])) / count
        if level >= ascending[count - 1]:
            break
    return [max(level - weight, 0) / more for weight in weights]


# ---- chain -------------------------------------------------------------------------------
# The operations of a model in their order, and where the order can be cut into contiguous groups.


class OperationChain:
    """A sequence of operations of which groups can be made; between two layers a cut is where least would travel.

    Args:
        nodes: the operations in order, without pieces of divided layers.
        weights: what to balance, of each operation.
    """

    def __init__(self, nodes: Sequence[fx.Node], weights: Mapping[fx.Node, float]) -> None:
        self._nodes = nodes
        barred = _barred(nodes)
        costs = _cut_costs(nodes)
        self._starts, self._costs = (
            [0],
            [0.0],
        )  # of runs that stay together, with at most one weighted layer each
        last: int | None = None
        for index, node in enumerate(nodes):
            if not weights[node]:
                continue
            free = [cut for cut in range(index if last is None else last + 1, index + 1) if cut not in barred]
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


def _barred(nodes: Sequence[fx.Node]) -> set[int]:
    """Positions before which no cut is possible: what follows writes in place, or needs what cannot be sent."""
    barred: set[int] = set()
    created: dict[int, int] = {}
    order = {node: index for index, node in enumerate(nodes)}
    for node, index in order.items():
        first = node.meta["values"][0]
        if isinstance(first, torch.Tensor):
            created.setdefault(storage(first), index)
        for written in node.meta["writes"]:
            barred.update(range(created.setdefault(written, index) + 1, index + 1))
        if form_of(node) is None:
            barred.update(range(index + 1, max(order.get(user, index) for user in [node, *node.users]) + 1))
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


def plan_split(
    model: TorchModel,
    example: Batch,
    parts: int,
    *,
    divides: bool = True,
    rounds: int = 1,
) -> TorchPlan:
    """Plans how to divide a model over parts, of about equal bytes. Each process finds the same plan by itself.

    Args:
        model: the whole model, which is not built.
        example: a minibatch, whose samples have the shapes and dtypes of all later ones.
        parts: number of parts, K >= 1.
        divides: whether wide layers may be divided, by columns or rows.
        rounds: number of stages of each part, which go round the parts. Above 1 no layer is divided.

    Raises:
        ConfigError: the model cannot be recorded, or cannot be cut in this way.
    """
    if parts < 1:
        raise ConfigError(f"plan_split: parts is {parts}, expected at least 1")
    graph = record(model, example)
    if rounds > 1:
        groups = OperationChain(graph.nodes, _weights(graph)).place(parts * rounds)
        placed = {node: group % parts for node, group in groups.items()}
    else:
        graph, placed = _by_weight(graph, parts, divides)
    return plan_placed(graph, placed, parts)


def value_name(node: fx.Node) -> str:
    """The name under which a node's result travels."""
    return f"{node.name}'" if node.name in _RESERVED else node.name


def parameter_of(value: str) -> str | None:
    """The parameter that a value of this name is; None if it is another value."""
    return value.removeprefix(_PARAMETER) if value.startswith(_PARAMETER) else None


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
                    "expected one stage: take fewer parts"
                )


def _carried(
    node: fx.Node, source: int, trained: bool, values: dict[str, Value], forms: dict[str, Form]
) -> str:
    """The name of a node's value, which is entered into `values` and `forms`."""
    form, name = form_of(node), value_name(node)
    if form is None:
        raise ConfigError(
            f"cannot split the model behind {where(node)}: the result would be sent to another part, and only a tensor "
            "with exactly one axis of samples can be sent; take fewer parts, or give the result an axis of samples"
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
