"""Torch models in pipelines: stages of a cut module, activations computed again, and streams of minibatches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from gradstream.model import Batch, TorchModel, from_torch
from gradstream.pipeline.schedule import make_schedule
from kit.pipeline_versions import StashedStages, weight_versions
from pipeline_plans import run_parts
from split_stages import Stages, batch_of, whole_gradient, whole_parameters

SAMPLES = 12
LR = 0.1


def network(dropout: float = 0.0) -> nn.Module:
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 3)).double()


def minibatch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return batch_of(inputs.numpy(), torch.randint(3, (SAMPLES,), generator=generator).numpy())


class ModelStages:
    """Stages of a cut module. With `again` it keeps inputs alone, and computes activations again in the backward."""

    def __init__(self, cut: Stages, weights: list[Tensor], count: int, *, again: bool = False) -> None:
        self.cut, self.own, self.count, self.again = cut, weights, count, again
        self.gradients = [torch.zeros_like(tensor) for tensor in weights]
        self.saved: dict[tuple[int, int], object] = {}
        self.forwards = 0

    async def forward(
        self, stage: int, micro_batch: int, values: Mapping[str, Tensor], weights: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        outputs, saved = self.run(stage, micro_batch, values, weights)
        self.saved[stage, micro_batch] = values if self.again else saved
        return outputs

    def run(
        self, stage: int, micro_batch: int, values: Mapping[str, Tensor], weights: Tensor | None
    ) -> tuple[dict[str, Tensor], object]:
        self.forwards += 1
        own = self.own[stage] if weights is None else weights
        return self.cut.models[stage].forward(own, values, seed=micro_batch, samples=SAMPLES // self.count)

    async def backward(
        self, stage: int, micro_batch: int, gradients: Mapping[str, Tensor], weights: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        saved = self.saved.pop((stage, micro_batch))
        if self.again:
            assert isinstance(saved, Mapping)
            _, saved = self.run(stage, micro_batch, saved, weights)
        into = self.gradients[stage]
        return self.cut.models[stage].backward(saved, gradients, into, weight=1 / self.count, add=True)

    async def weights(self, stage: int, micro_batch: int) -> None:
        raise NotImplementedError

    async def update(self, stage: int, minibatch: int, weights: Tensor) -> None:
        weights.sub_(self.gradients[stage], alpha=LR)
        self.gradients[stage].zero_()


def values_of(batch: Batch, count: int) -> dict[str, tuple[Tensor, ...]]:
    pairs = (("inputs", batch.inputs), ("targets", batch.targets))
    return {name: torch.split(torch.as_tensor(value), SAMPLES // count) for name, value in pairs}


def split_gradient(
    model: TorchModel, name: str, parts: int, count: int, *, again: bool
) -> tuple[Tensor, ModelStages]:
    batch = minibatch()
    cut = Stages.of(model, batch, parts)
    stages = ModelStages(cut, cut.divide(whole_parameters(model)), count, again=again)
    rows = values_of(batch, count)
    schedules = make_schedule(name, cut.plan, count)
    run_parts(cut.plan, schedules, [stages] * parts, lambda value, number: rows[value][number])
    return cut.joined(stages.gradients), stages


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_cut_module_in_a_pipeline_has_the_gradient_of_the_whole_module(name: str) -> None:
    model = from_torch(network, nn.functional.cross_entropy)
    _, expected = whole_gradient(model, minibatch(), whole_parameters(model))
    for parts in (1, 2, 3, 4):
        for count in (1, 2, 4):
            gradient, _ = split_gradient(model, name, parts, count, again=False)
            assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-14), (parts, count)


def test_activations_that_are_computed_again_give_the_same_bits_also_with_dropout() -> None:
    model = from_torch(lambda: network(0.3), nn.functional.cross_entropy)
    kept, keeping = split_gradient(model, "gpipe", 3, 4, again=False)
    again, repeating = split_gradient(model, "gpipe", 3, 4, again=True)
    assert torch.equal(kept, again)
    assert repeating.forwards == 2 * keeping.forwards


def micro_batch_of(rows: list[dict[str, tuple[Tensor, ...]]], count: int, name: str, number: int) -> Tensor:
    return rows[number // count][name][number % count]


@pytest.mark.parametrize(("name", "count"), [("pipedream", 1), ("delayed", 1), ("2bw", 2)])
def test_streams_of_a_cut_module_update_every_stage(name: str, count: int) -> None:
    """With one part, and one micro-batch of a minibatch, a stream is SGD of the whole module, to the bit."""
    model = from_torch(network, nn.functional.cross_entropy)
    minibatches = [minibatch(seed) for seed in range(6)]
    for parts in (1, 3):
        cut = Stages.of(model, minibatches[0], parts)
        weights = cut.divide(whole_parameters(model))
        stages, total = ModelStages(cut, weights, count), count * len(minibatches)
        schedules = make_schedule(name, cut.plan, total)
        versions = weight_versions(name, cut.plan, schedules, micro_batches=count)
        stashed = [
            StashedStages(
                stages,
                {stage.number: weights[stage.number] for stage in cut.plan.stages_of(part)},
                schedules[part],
                versions,
                count,
            )
            for part in range(parts)
        ]
        rows = [values_of(batch, count) for batch in minibatches]
        run_parts(cut.plan, schedules, stashed, partial(micro_batch_of, rows, count))
        stashes = {number: stash for each in stashed for number, stash in each.stashes.items()}
        final = cut.joined([stashes[stage.number].newest for stage in cut.plan.stages])
        expected = whole_parameters(model)
        for batch in minibatches:
            expected.sub_(whole_gradient(model, batch, expected)[1], alpha=LR)
        assert torch.equal(final, expected) == (parts == 1 and count == 1)
        assert torch.isfinite(final).all()
        assert all(
            stash.newest.data_ptr() == weights[n].data_ptr()
            for n, stash in stashes.items()
            if name == "delayed"
        )
