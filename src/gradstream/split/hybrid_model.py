"""`HybridModel`: one part of a hybrid, with its share of the data-parallel layers, and its pieces of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import torch

from gradstream.model.batch import Batch
from gradstream.model.torch_module import TorchModel
from gradstream.split.cut import TorchPlan
from gradstream.split.graph import Piece
from gradstream.split.hybrid import EVERYWHERE, plan_hybrid
from gradstream.split.part_model import PartModel
from gradstream.split.stage_model import StageModel


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
