"""`HybridModel`: one part of a hybrid, with its share of the data-parallel layers, and its pieces of the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812  its usual name
from torch.nn.modules.batchnorm import _BatchNorm

from gradstream.errors import ConfigError
from gradstream.model.base import Batch
from gradstream.model.torch_module import TorchModel
from gradstream.split.cut import TorchPlan, joined, plan_placed, ranges_of
from gradstream.split.divide import divide, divisible, part_of_piece
from gradstream.split.graph import Graph, Piece, form_of, record
from gradstream.split.part_model import PartModel
from gradstream.split.plan import DATA, Stage
from gradstream.split.refusals import storage, where
from gradstream.split.stage_model import StageModel

# ---- hybrid ------------------------------------------------------------------------------
# Plans a hybrid: some layers of a model are divided over the parts, and every part has all others.
#
#     part k:   own samples ─ convolutions ─▶ its columns or rows of a layer, for all samples ─▶ own samples ─ ...
#               └────── data parallel ──────┘ └───────────────── model parallel ────────────┘    └ data parallel
#
# A plan has three kinds of stages, in this order:
#
# * shares: stage k says which elements of the data-parallel layers part k trains, and computes nothing. So each element
#   of the model is trained by one part. The others get it before each gradient, and send their gradients of it.
# * data-parallel stages, whose part is EVERYWHERE: each part computes them, for samples of its own.
# * pieces of model-parallel layers, each on its part (`split.divide`), between them.
#
# A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.

EVERYWHERE = -1
"""In place of the part of a stage: every part computes it, for samples of its own."""


def plan_hybrid(
    model: TorchModel, example: Batch, parts: int, layers: Sequence[str] | None = None
) -> TorchPlan:
    """Plans model-parallel `layers` in an otherwise data-parallel replica. Each process finds the same plan by itself.

    Args:
        model: the whole model, which is not built.
        example: a minibatch, whose samples have the shapes and dtypes of all later ones.
        parts: number of parts, K >= 1.
        layers: qualified names of the linear layers and convolutions that are divided over all parts; None: the
            linear layers at the end, behind the last layer of another kind.

    Raises:
        ConfigError: the model cannot be recorded, or its result would differ from that of the whole minibatch.
    """
    graph = record(model, example)
    _refuse_mixing(graph)
    for node in _at_the_end(graph) if layers is None else _named(graph, layers):
        graph = divide(graph, node, [1 / parts] * parts)
    pieces = {node: part for node in graph.nodes if (part := part_of_piece(node)) is not None}
    placed = {**dict.fromkeys(graph.nodes, EVERYWHERE), **pieces}
    plan = plan_placed(graph, placed, parts)
    for value in plan.values:
        if not value.per_sample:
            raise ConfigError(
                f"hybrid: {value.name!r} is used before and behind a divided layer, and has no axis of samples; "
                "expected layers that share no parameter, or Hybrid(layers=...) with others"
            )
    return _with_shares(plan)


def _at_the_end(graph: Graph) -> list[fx.Node]:
    """The linear layers at the end of a model."""
    trained = {slot.name for slot in graph.layout.slots}
    found: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if not any(piece.name in trained for piece in graph.tensors_of(node)):
            continue
        linear = node.op == "call_module" and isinstance(_module(graph, node), nn.Linear)
        if not linear or not divisible(graph, node):
            break
        found.append(node)
    if not found:
        raise ConfigError(
            "hybrid: the last layer of the model is not linear, or cannot be divided; expected Hybrid(layers=...), "
            "the names of linear layers or convolutions"
        )
    return found[::-1]


def _named(graph: Graph, layers: Sequence[str]) -> Iterator[fx.Node]:
    by_name = {str(node.target): node for node in graph.nodes if node.op == "call_module"}
    for name in layers:
        if name not in by_name or not divisible(graph, by_name[name]):
            able = [target for target, node in by_name.items() if divisible(graph, node)]
            raise ConfigError(
                f"Hybrid(layers=...) names {name!r}, which cannot be divided; expected some of "
                f"{', '.join(able) or 'none'}"
            )
        yield by_name[name]


def _module(graph: Graph, node: fx.Node) -> nn.Module:
    return graph.blueprint.module.get_submodule(str(node.target))


def _refuse_mixing(graph: Graph) -> None:
    """Raises ConfigError for an operation that joins samples, of which each part has only its own."""
    buffers = {storage(tensor) for tensor in graph.blueprint.module.buffers()}
    for node in graph.nodes:
        module = _module(graph, node) if node.op == "call_module" else None
        norm = isinstance(module, _BatchNorm) or node.target is F.batch_norm
        forms = [form_of(used) for used in node.all_input_nodes if "values" in used.meta]
        joins = any(form and form.axis is not None for form in forms) and _is_alike(node)
        if norm or joins or not buffers.isdisjoint(node.meta["writes"]):
            raise ConfigError(
                f"hybrid: {where(node)}: joins the samples of a minibatch, of which each part has only some, so that "
                "the result would not be that of the whole minibatch; expected operations on each sample by itself, "
                "such as GroupNorm instead of BatchNorm"
            )


def _is_alike(node: fx.Node) -> bool:
    """Whether an operation gives a tensor without an axis of samples."""
    form = form_of(node)
    return form is not None and form.axis is None


def _with_shares(plan: TorchPlan) -> TorchPlan:
    """The plan with a stage for each part's share of the data-parallel layers, before all others."""
    count, slots = plan.parts, {slot.name: slot for slot in plan.graph.layout.slots}
    shared = [stage.part == EVERYWHERE for stage in plan.stages]
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    for piece in (piece for owned, own in zip(plan.pieces, shared, strict=True) if own for piece in owned):
        rows = slots[piece.name].shape[:1]
        for part, own in enumerate(pieces):
            start, stop = (edge * rows[0] // count for edge in (part, part + 1)) if rows else (0, part == 0)
            if start < stop:
                own.append(Piece(piece.name, 0, start, stop) if rows else piece)
    for own in pieces:
        own.sort(key=lambda piece: ranges_of(slots[piece.name], piece))
    shares = [
        Stage(part, part, (), (), joined(r for piece in own for r in ranges_of(slots[piece.name], piece)))
        for part, own in enumerate(pieces)
    ]
    behind = [
        replace(stage, number=stage.number + count, ranges=() if own else stage.ranges)
        for stage, own in zip(plan.stages, shared, strict=True)
    ]
    values = tuple(
        value if value.source == DATA else replace(value, source=value.source + count)
        for value in plan.values
    )
    return replace(
        plan,
        stages=(*shares, *behind),
        values=values,
        nodes=((),) * count + plan.nodes,
        pieces=(*map(tuple, pieces), *plan.pieces),
    )


# ---- hybrid model ------------------------------------------------------------------------


class HybridModel(PartModel):
    """Implements `Model` for one part of a hybrid.

    The data-parallel layers together have a vector, of which every part has a copy while it computes a gradient.

    Args:
        model, example, parts, part: see `PartModel`.
        layers: see `plan_hybrid`.
    """

    def __init__(
        self, model: TorchModel, example: Batch, parts: int, part: int, layers: Sequence[str] | None = None
    ) -> None:
        super().__init__(model, example, parts, part)
        self._layers = None if layers is None else tuple(layers)

    @property
    def _kind(self) -> tuple[object, ...]:
        return ("hybrid", self._layers)

    def _planned(self) -> TorchPlan:
        return plan_hybrid(self._model, self._example, self._parts, self._layers)

    @cached_property
    def everywhere(self) -> Mapping[int, StageModel]:
        """The data-parallel stages, by number."""
        own = self.plan.stages_of(EVERYWHERE)
        return {stage.number: StageModel(self._model, self.plan, stage.number) for stage in own}

    def model_of(self, number: int) -> StageModel:
        """Computes a stage."""
        return self.everywhere[number] if number in self.everywhere else self.stages[number]

    def share(self, number: int) -> float:
        """See `PartModel.share`: of a data-parallel stage for the samples of one part alone."""
        return float(self.model_of(number).layout.elems / max(1, self.whole.elems))

    def of(self, number: int, own: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
        """The elements of a stage.

        Args:
            number: of the stage.
            own: a vector of this part.
            common: a vector of the data-parallel layers.
        """
        return common[self._common[number]] if number in self._common else self.of_stage(number, own)

    @cached_property
    def common_elems(self) -> int:
        """Length of the vector of the data-parallel layers."""
        return sum(model.layout.elems for model in self.everywhere.values())

    @cached_property
    def _common(self) -> Mapping[int, slice]:
        ends = list(accumulate((model.layout.elems for model in self.everywhere.values()), initial=0))
        return dict(zip(self.everywhere, map(slice, ends, ends[1:]), strict=False))

    def pieces_of(self, part: int, common: torch.Tensor) -> list[torch.Tensor]:
        """A part's share of a vector of the data-parallel layers, as views in the order of the part's own vector."""
        places = {
            slot.name: (self._common[number].start + slot.start, slot.shape)
            for number, model in self.everywhere.items()
            for slot in model.layout.slots
        }

        def view(piece: Piece) -> torch.Tensor:
            start, shape = places[piece.name]
            inner = math.prod(shape[1:])
            first, last = (
                (0, math.prod(shape)) if piece.axis is None else (piece.start * inner, piece.stop * inner)
            )
            return common[start + first : start + last]

        return [view(piece) for piece in self.plan.pieces[part]]

    def put_share(self, part: int, share: torch.Tensor, common: torch.Tensor) -> None:
        """Copies a part's share into a vector of the data-parallel layers."""
        at = 0
        for view in self.pieces_of(part, common):
            view.copy_(share[at : at + len(view)])
            at += len(view)

    def share_elems(self, part: int) -> int:
        """Length of a part's share, with which its own vector begins."""
        return sum(stop - start for start, stop in self.plan.stages[part].ranges)
