"""Streams of minibatches: the weights that each pass reads, what a part keeps, and a serial replay of the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradstream.errors import ConfigError, InternalError
from gradstream.pipeline.schedule import STREAMING, StagePass, make_schedule
from gradstream.split.plan import DATA, SplitPlan
from kit.pipeline_versions import StashedStages, WeightStash, weight_versions
from pipeline_plans import UNITS, TorchStages, chain, compute, drawn_plan, run_parts

SAMPLES = 2
MINIBATCHES = 10


def stream(plan: SplitPlan, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights, and micro-batches."""
    generator = torch.Generator().manual_seed(1)
    shape = (count, SAMPLES, UNITS)
    values = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in ("inputs", "targets")
    }
    return torch.randn(plan.elems, generator=generator, dtype=torch.float64) / 2, values


class Trained:
    """A stream, trained by a pipeline on virtual time."""

    def __init__(
        self,
        name: str,
        plan: SplitPlan,
        micro_batches: int = 1,
        *,
        dropped: bool = False,
    ) -> None:
        self.plan, self.micro_batches = plan, micro_batches
        self.count = MINIBATCHES * micro_batches
        self.initial, self.data = stream(plan, self.count)
        schedules = make_schedule(name, plan, self.count)
        self.versions = weight_versions(name, plan, schedules, micro_batches=micro_batches)
        computed = [
            TorchStages(plan, self.initial, samples=SAMPLES * micro_batches) for _ in range(plan.parts)
        ]
        self.parts = [
            StashedStages(
                computed[part],
                {stage.number: self.weights_of(stage.number) for stage in plan.stages_of(part)},
                schedule,
                self.versions,
                micro_batches,
            )
            for part, schedule in enumerate(schedules)
        ]
        if dropped:
            for each in self.parts:
                for number, stash in each.stashes.items():
                    each.stashes[number] = DroppedStash(stash.newest, ())
        run_parts(plan, schedules, self.parts, lambda name, number: self.data[name][number], pausing=computed)
        self.computed = computed
        stashes = {number: stash for each in self.parts for number, stash in each.stashes.items()}
        self.final = torch.cat([stashes[stage.number].newest for stage in plan.stages])
        self.most = tuple(stashes[stage.number].most for stage in plan.stages)

    def weights_of(self, number: int) -> Tensor:
        return self.initial[slice(*self.plan.stages[number].ranges[0])].clone()

    def trace(self) -> dict[StagePass, int]:
        return {step: version for each in self.parts for step, version in each.trace}


class DroppedStash(WeightStash):
    """The planted fault: a stash that keeps nothing."""

    def read(self, version: int) -> Tensor:
        return self.newest


def replayed(trained: Trained) -> Tensor:
    """The final weights, from one minibatch after the other, with the versions of the trace, all of them kept."""
    plan, trace = trained.plan, trained.trace()
    computed = TorchStages(plan, trained.initial, samples=SAMPLES * trained.micro_batches)
    history = [[trained.weights_of(stage.number)] for stage in plan.stages]

    async def minibatch(number: int) -> None:
        for micro_batch in range(number * trained.micro_batches, (number + 1) * trained.micro_batches):
            values = {name: value[micro_batch] for name, value in trained.data.items()}
            read: dict[int, Tensor] = {}
            for stage in plan.stages:
                read[stage.number] = history[stage.number][
                    trace[StagePass("forward", stage.number, micro_batch)]
                ].clone()
                inputs = {name: values[name] for name in stage.inputs}
                values.update(await computed.forward(stage.number, micro_batch, inputs, read[stage.number]))
            gradients: dict[str, list[tuple[int, Tensor]]] = {}
            for stage in reversed(plan.stages):
                version = trace[StagePass("backward", stage.number, micro_batch)]
                read[stage.number].copy_(history[stage.number][version])
                given = {name: summed(plan, gradients[name]) for name in stage.outputs}
                results = await computed.backward(stage.number, micro_batch, given, read[stage.number])
                for name, tensor in results.items():
                    gradients.setdefault(name, []).append((stage.number, tensor))
        for stage in plan.stages:
            history[stage.number].append(history[stage.number][-1].clone())
            await computed.update(stage.number, number, history[stage.number][-1])

    for number in range(MINIBATCHES):
        asyncio.run(minibatch(number))
    return torch.cat([versions[-1] for versions in history])


def summed(plan: SplitPlan, gradients: list[tuple[int, Tensor]]) -> Tensor:
    """In the executor's order: over the stages of a part, then over the parts."""
    totals: dict[int, Tensor] = {}
    for number, tensor in sorted(gradients, key=lambda pair: (plan.stages[pair[0]].part, pair[0])):
        part = plan.stages[number].part
        totals[part] = totals[part] + tensor if part in totals else tensor
    total, *others = totals.values()
    for other in others:
        total = total + other
    return total


@pytest.mark.parametrize("name", STREAMING)
def test_a_serial_replay_with_the_versions_of_the_trace_has_the_same_bits(name: str) -> None:
    plans = [chain(parts) for parts in (1, 2, 3, 4)] + [drawn_plan(3, 7, seed) for seed in range(4)]
    for plan in plans:
        trained = Trained(name, plan, max(4, len(plan.stages)) if name == "2bw" else 1)
        assert trained.trace() == trained.versions
        assert torch.equal(trained.final, replayed(trained))
        assert not torch.equal(trained.final, trained.initial)


@pytest.mark.parametrize("name", [name for name in STREAMING if name != "delayed"])
def test_the_replay_finds_a_stash_that_is_dropped(name: str) -> None:
    trained = Trained(name, chain(3), 4 if name == "2bw" else 1, dropped=True)
    assert not torch.equal(trained.final, replayed(trained))


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
def test_on_a_chain_the_versions_are_those_of_the_papers(parts: int) -> None:
    plan, count, late = chain(parts), 12, parts - 1
    cases: list[tuple[str, Callable[[int, int], int], Callable[[int, int], int]]] = [
        ("pipedream", lambda t, s: t - (late - s), lambda t, s: t - (late - s)),
        ("pipedream-vertical", lambda t, s: t - late, lambda t, s: t - late),
        ("delayed", lambda t, s: t - 2 * (late - s), lambda t, s: t),
    ]
    for name, forward, backward in cases:
        versions = weight_versions(name, plan, make_schedule(name, plan, count))
        for step, version in versions.items():
            expected = (forward if step.kind == "forward" else backward)(step.micro_batch, step.stage)
            assert version == max(0, expected), (name, step)


def test_a_part_keeps_as_many_versions_as_the_papers_say() -> None:
    plan = chain(4)
    assert Trained("pipedream", plan).most == (4, 3, 2, 1)
    assert Trained("pipedream-vertical", plan).most == (4, 4, 4, 4)
    assert Trained("2bw", plan, 4).most == (2, 2, 2, 2)
    assert Trained("2bw", plan, 3).most == (2, 2, 2, 2)
    assert Trained("delayed", plan).most == (1, 1, 1, 1)


@pytest.mark.parametrize("name", ["pipedream", "delayed"])
def test_with_one_part_a_stream_is_sgd_to_the_bit(name: str) -> None:
    trained = Trained(name, chain(1))
    weights = trained.initial.clone()
    for number in range(MINIBATCHES):
        leaf = weights.clone().requires_grad_()
        values = {key: value[number] for key, value in trained.data.items()}
        (gradient,) = torch.autograd.grad(compute(0, leaf, values, last=True, flat=False) / SAMPLES, leaf)
        weights -= trained.computed[0].lr * gradient
    assert torch.equal(trained.final, weights)


def test_a_stream_on_several_parts_is_not_sgd() -> None:
    """Else the check above would show nothing."""
    assert (
        len({tuple(Trained(name, chain(3), 1 + 2 * (name == "2bw")).final.tolist()) for name in STREAMING})
        == 4
    )


def test_a_version_that_is_not_held_is_named() -> None:
    stash = WeightStash(torch.zeros(2), [0, 1])
    stash.read(0)
    stash.advance()
    with pytest.raises(InternalError, match="version 0 of the weights is not held: the newest is 1"):
        stash.read(0)


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("1f1b", {}, "unknown schedule of a stream '1f1b'"),
    ("2bw", {"micro_batches": 2}, "micro_batches=2 with pipeline='2bw': expected at least 3"),
    ("delayed", {"micro_batches": 2}, "micro_batches=2 with pipeline='delayed': expected 1"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSALS)
def test_what_does_not_go_together_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    plan = chain(4)
    with pytest.raises(ConfigError, match=message):
        weight_versions(name, plan, make_schedule("1f1b", plan, 8), **options)


def test_reads_of_data_have_no_version() -> None:
    plan = chain(3)
    assert all(s.stage != DATA for s in weight_versions("delayed", plan, make_schedule("delayed", plan, 4)))
