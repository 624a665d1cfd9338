"""Cuts a torch model into stages: `plan_split`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from gradstream.errors import ConfigError
from gradstream.model.base import Layout, Slot
from gradstream.model.batch import Batch
from gradstream.model.torch_module import TorchModel
from gradstream.split.balance import filled
from gradstream.split.chain import Chain
from gradstream.split.divide import divide, divisible, part_of_piece
from gradstream.split.graph import Form, Graph, Piece, form_of, record
from gradstream.split.plan import DATA, SplitPlan, Stage, Value
from gradstream.split.trace import storage, where

__all__ = ["TorchPlan", "layout_of_stage", "parameter_of", "plan_split", "value_name"]

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
    map: Mapping[str, int] | None = None,  # noqa: A002  what users call it
    by: Literal["bytes", "seconds"] = "bytes",
) -> TorchPlan:
    """Plans how to divide a model over parts. A pure function: each process finds the same plan by itself.

    Args:
        model: the whole model, which is not built.
        example: a minibatch, whose samples have the shapes and dtypes of all later ones.
        parts: number of parts, K >= 1.
        map: the part of each module, by its qualified name; a name counts for all that is inside, unless a
            longer name says otherwise. What it does not name is with the operation before.
        by: what to balance where there is no map: the bytes of the parameters.

    Raises:
        ConfigError: the model cannot be recorded, or cannot be cut in this way.
    """
    if parts < 1:
        raise ConfigError(f"plan_split: parts is {parts}, expected at least 1")
    graph = record(model, example)
    if map is None:
        graph, placed = _by_weight(graph, parts)
    else:
        placed = _by_map(graph, parts, map)
    return _plan(graph, placed, parts)


def value_name(node: fx.Node) -> str:
    """The name under which a node's result travels."""
    return f"{node.name}'" if node.name in _RESERVED else node.name


def parameter_of(value: str) -> str | None:
    """The parameter that a value of this name is; None if it is another value."""
    return value.removeprefix(_PARAMETER) if value.startswith(_PARAMETER) else None


def _by_map(graph: Graph, parts: int, given: Mapping[str, int]) -> dict[fx.Node, int]:
    unknown = [name for name in given if name not in dict(graph.blueprint.module.named_modules())]
    if unknown:
        raise ConfigError(
            f"plan_split: map names {unknown[0]!r}, and the model has no such module: see named_modules()"
        )
    wrong = [name for name, part in given.items() if not 0 <= part < parts]
    if wrong:
        raise ConfigError(
            f"plan_split: map[{wrong[0]!r}] is {given[wrong[0]]}, expected a part from 0 to {parts - 1}"
        )
    placed: dict[fx.Node, int] = {}
    part = 0
    for node in graph.nodes:
        path = str(node.target) if node.op == "call_module" else _path(node)
        while path and path not in given:
            path = path.rpartition(".")[0]
        part = given.get(path, part)
        placed[node] = part
    barred = Chain(graph.nodes, dict.fromkeys(graph.nodes, 0)).barred
    for index, (node, before) in enumerate(zip(graph.nodes[1:], graph.nodes, strict=False), 1):
        if index in barred and placed[node] != placed[before]:
            raise ConfigError(f"plan_split: map cuts before {where(node)}; {barred[index]}")
    return placed


def _path(node: fx.Node) -> str:
    """Qualified name of the module in which an operation is."""
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""


def _by_weight(graph: Graph, parts: int) -> tuple[Graph, dict[fx.Node, int]]:
    """Contiguous groups of about equal bytes. Layers of more than 1/parts of all are divided, and fill the parts up."""
    weights = _weights(graph)
    room = graph.layout.elems / parts
    wide = [node for node in graph.nodes if parts > 1 and weights[node] > room and divisible(graph, node)]
    if not wide:
        return graph, Chain(graph.nodes, weights).place(parts)
    chain = Chain(graph.nodes, {**weights, **dict.fromkeys(wide, 0)})
    # The others go on as few parts as have room for them.
    options = [chain.group_weights(count) for count in range(1, min(parts, chain.most_groups) + 1)]
    others = next((groups for groups in options if max(groups) <= room), options[-1])
    shares = filled([*others, *[0.0] * (parts - len(others))], sum(weights[node] for node in wide))
    for node in wide:
        graph = divide(graph, node, shares)
    pieces = {node: part for node in graph.nodes if (part := part_of_piece(node)) is not None}
    rest = [node for node in graph.nodes if node not in pieces]
    return graph, Chain(rest, _weights(graph)).place(len(others)) | pieces


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


def _plan(graph: Graph, placed: Mapping[fx.Node, int], parts: int) -> TorchPlan:
    """The plan with these operations on these parts."""
    groups: list[list[fx.Node]] = []
    for node in graph.nodes:
        alone = any(part_of_piece(end) is not None for end in (node, *(groups[-1][-1:] if groups else ())))
        if not groups or alone or placed[node] != placed[groups[-1][-1]]:
            groups.append([])
        groups[-1].append(node)
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
    pieces = tuple(tuple(sorted(own, key=lambda piece: _ranges(slots[piece.name], piece))) for own in owned)
    stages = tuple(
        Stage(
            number,
            placed[nodes[0]],
            tuple(used[number]),
            tuple(name for name, value in travelling.items() if value.source == number),
            _joined(bounds for piece in pieces[number] for bounds in _ranges(slots[piece.name], piece)),
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


def _carried(
    node: fx.Node, source: int, trained: bool, values: dict[str, Value], forms: dict[str, Form]
) -> str:
    """The name of a node's value, which is entered into `values` and `forms`."""
    form, name = form_of(node), value_name(node)
    if form is None:
        raise ConfigError(
            f"plan_split: the result of {where(node)} would travel to another part, and it is no tensor with one axis "
            "that is the samples: cut elsewhere"
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


def _ranges(slot: Slot, piece: Piece) -> list[tuple[int, int]]:
    """[start, stop) of a piece in the whole flat vector."""
    if piece.axis is None:
        return [(slot.start, slot.stop)]
    inner = math.prod(slot.shape[piece.axis + 1 :])
    row = slot.shape[piece.axis] * inner
    return [
        (start + piece.start * inner, start + piece.stop * inner)
        for start in range(slot.start, slot.stop, row)
    ]


def _joined(ranges: Iterator[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
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
