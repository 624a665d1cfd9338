"""The parts of a hybrid in one process, on virtual time."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradstream.model import Batch, TorchModel
from gradstream.pipeline.hybrid import make_turns, run_turns
from gradstream.runtime.virtual import VirtualCluster
from gradstream.split.graph import minibatch_values
from gradstream.split.hybrid_model import HybridModel
from pipeline_plans import VirtualChannel


class PartStages:
    """Implements `HybridStages` for one part."""

    def __init__(self, model: HybridModel, own: Tensor, common: Tensor, samples: int) -> None:
        self.model, self.own, self.common = model, own, common
        self.own_gradient, self.common_gradient = torch.zeros_like(own), torch.zeros_like(common)
        self.total = samples
        self.saved: dict[tuple[int, int], object] = {}
        self.loss = 0.0
        self.mean = model.reduction == "mean"

    def seed(self, turn: int) -> int:
        return turn * self.model.plan.parts + self.model.part

    async def forward(
        self, stage: int, turn: int, samples: int, values: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        parameters = self.model.of(stage, self.own, self.common)
        stage_model = self.model.model_of(stage)
        outputs, saved = stage_model.forward(parameters, values, seed=self.seed(turn), samples=samples)
        self.saved[stage, turn] = saved
        if "loss" in outputs:
            self.loss += float(outputs["loss"]) * (samples / self.total if self.mean else 1.0)
        return outputs

    async def backward(
        self, stage: int, turn: int, samples: int, gradients: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        into = self.model.of(stage, self.own_gradient, self.common_gradient)
        weight = samples / self.total if self.mean and stage == len(self.model.plan.stages) - 1 else 1.0
        stage_model, saved = self.model.model_of(stage), self.saved.pop((stage, turn))
        returned = stage_model.backward(saved, gradients, into, weight=weight, add=True)
        return {name: gradient * weight for name, gradient in returned.items()}


class HybridParts:
    """All parts of a hybrid.

    Attributes:
        parts: their stages, after a gradient.
        channel: what has travelled.
    """

    def __init__(
        self, model: TorchModel, batch: Batch, parts: int, layers: Sequence[str] | None = None
    ) -> None:
        self.models = [HybridModel(model, batch, parts, part, layers) for part in range(parts)]
        self.plan = self.models[0].plan

    def divide(self, whole: Tensor) -> list[Tensor]:
        """The vector of each part, out of the whole one."""
        return [
            torch.cat([whole[start:stop] for start, stop in self.plan.ranges_of(part)])
            for part in range(self.plan.parts)
        ]

    def joined(self, vectors: Sequence[Tensor]) -> Tensor:
        """The whole vector, out of those of the parts. NaN where no part has an element."""
        whole = torch.full((self.plan.elems,), torch.nan, dtype=vectors[0].dtype)
        for part, vector in enumerate(vectors):
            at = 0
            for start, stop in self.plan.ranges_of(part):
                whole[start:stop] = vector[at : at + stop - start]
                at += stop - start
            assert at == len(vector)
        return whole

    def common(self, vectors: Sequence[Tensor]) -> Tensor:
        """The vector of the data-parallel layers, out of the parts' shares."""
        model = self.models[0]
        common = torch.full((model.common_elems,), torch.nan, dtype=vectors[0].dtype)
        for part, vector in enumerate(vectors):
            model.put_share(part, vector[: model.share_elems(part)], common)
        assert not common.isnan().any()
        return common

    def gradient(self, schedule: str, whole: Tensor, batch: Batch) -> tuple[float, Tensor]:
        """Loss and gradient of a minibatch."""
        own = self.divide(whole)
        cluster, rng = VirtualCluster(0), random.Random(0)
        runtime = cluster.runtime("parts")
        self.channel = VirtualChannel(self.plan, runtime, rng)
        turns = make_turns(schedule, batch.num_samples, self.plan.parts)
        values = minibatch_values(self.plan.graph, batch)
        self.parts = [
            PartStages(model, vector, self.common(own), batch.num_samples)
            for model, vector in zip(self.models, own, strict=True)
        ]

        async def all_parts() -> None:
            await runtime.gather(
                *(
                    run_turns(
                        self.plan,
                        part,
                        turns,
                        stages,
                        self.channel,
                        lambda name, rows: values[name][slice(*rows)],
                    )
                    for part, stages in enumerate(self.parts)
                )
            )

        cluster.run(all_parts())
        assert not self.channel.left()
        common = torch.stack([stages.common_gradient for stages in self.parts]).sum(0)
        for part, stages in enumerate(self.parts):
            share = self.models[0].pieces_of(part, common)
            stages.own_gradient[: self.models[0].share_elems(part)] = torch.cat([*share, common[:0]])
        return sum(stages.loss for stages in self.parts), self.joined(
            [one.own_gradient for one in self.parts]
        )
