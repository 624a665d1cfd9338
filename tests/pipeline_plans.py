"""Split models for tests of pipelines: plans, their stages in torch, and a channel on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

import torch
from torch import Tensor

from gradstream.pipeline.executor import PipelineExecutor, Stages, TensorTransfer
from gradstream.pipeline.schedule import Schedule
from gradstream.runtime.virtual import VirtualCluster, VirtualRuntime
from gradstream.split.plan import DATA, SplitPlan, Stage, Value

UNITS = 3


def chain(parts: int, rounds: int = 1) -> SplitPlan:
    """Stages one after the other, which go round the parts."""
    count = parts * rounds
    return make_plan(parts, [number % parts for number in range(count)], [[n - 1] for n in range(1, count)])


def drawn_plan(parts: int, count: int, seed: int) -> SplitPlan:
    """A random graph: any part may have any stage, and a value may have users on several parts."""
    rng = random.Random(seed)
    where = [rng.randrange(parts) for _ in range(count)]
    sources = [rng.sample(range(n), rng.randint(1, min(n, 3))) for n in range(1, count)]
    used = {source for row in sources for source in row}
    sources[-1:] = [sorted({*sources[-1], *(set(range(count - 1)) - used)})] if count > 1 else []
    return make_plan(parts, where, sources)


def make_plan(parts: int, where: Sequence[int], sources: Sequence[Sequence[int]]) -> SplitPlan:
    """Stage 0 uses the inputs, stage n the values of stages sources[n - 1], the last one the targets too."""
    last = len(where) - 1
    stages, square = [], UNITS * UNITS
    for number, part in enumerate(where):
        inputs = [f"h{source}" for source in sources[number - 1]] if number else ["inputs"]
        inputs += ["targets"] if number == last else []
        outputs = () if number == last else (f"h{number}",)
        stages.append(
            Stage(number, part, tuple(inputs), outputs, ((number * square, (number + 1) * square),))
        )
    names = {"inputs": DATA, "targets": DATA, **{f"h{number}": number for number in range(last)}}
    values = [Value(name, source, (UNITS,), torch.float64) for name, source in names.items()]
    return SplitPlan(parts, tuple(stages), tuple(values), len(where) * square)


def compute(number: int, weights: Tensor, values: Mapping[str, Tensor], last: bool, flat: bool) -> Tensor:
    """A stage: its output, or the loss. `flat` leaves out what rounds."""
    total = torch.stack([value for name, value in values.items() if name != "targets"]).sum(0) @ weights.view(
        UNITS, UNITS
    )
    if last:
        return (total * values["targets"]).sum() if flat else (total - values["targets"]).square().sum()
    return total if flat else torch.tanh(total + number)


class TorchStages:
    """Stages in torch, with their own weights or with given ones. The loss is a sum, divided by `samples`."""

    def __init__(self, plan: SplitPlan, parameters: Tensor, *, samples: int = 1, flat: bool = False) -> None:
        self.plan, self.parameters, self.samples, self.flat = plan, parameters, samples, flat
        self.gradient = torch.zeros_like(parameters)
        self.saved: dict[tuple[int, int], tuple[dict[str, Tensor], Tensor]] = {}
        self.late: dict[tuple[int, int], Tensor] = {}
        self.defers = False
        self.most_saved = 0
        self.lr = 0.05
        self.pause: Callable[[], Awaitable[None]] | None = None

    @property
    def share(self) -> float:
        """The weight of a sample in the mean."""
        return 1 / self.samples

    def own(self, stage: int) -> slice:
        return slice(*self.plan.stages[stage].ranges[0])

    async def forward(
        self, stage: int, micro_batch: int, values: Mapping[str, Tensor], weights: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        if self.pause:
            await self.pause()
        leaves = {
            name: value.detach().requires_grad_(self.plan.value(name).has_gradient)
            for name, value in values.items()
        }
        # .data: an update in place of weights that nobody stashes is meant to reach the backward.
        leaf = (self.parameters[self.own(stage)] if weights is None else weights).data.requires_grad_()
        out = compute(stage, leaf, leaves, stage == len(self.plan.stages) - 1, self.flat)
        self.saved[stage, micro_batch] = {**leaves, "weights": leaf}, out
        self.most_saved = max(self.most_saved, len(self.saved))
        return {name: out.detach() for name in self.plan.stages[stage].outputs}

    async def backward(
        self, stage: int, micro_batch: int, gradients: Mapping[str, Tensor], weights: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        if self.pause:
            await self.pause()
        leaves, out = self.saved.pop((stage, micro_batch))
        (gradient,) = gradients.values() or (torch.tensor(self.share, dtype=out.dtype),)
        used = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        results = dict(zip(used, torch.autograd.grad(out, list(used.values()), gradient), strict=True))
        if self.defers:
            self.late[stage, micro_batch] = results.pop("weights")
        else:
            self.gradient[self.own(stage)] += results.pop("weights")
        return results

    async def weights(self, stage: int, micro_batch: int) -> None:
        self.gradient[self.own(stage)] += self.late.pop((stage, micro_batch))

    async def update(self, stage: int, minibatch: int, weights: Tensor) -> None:
        weights -= self.lr * self.gradient[self.own(stage)]
        self.gradient[self.own(stage)] = 0


class VirtualChannel:
    """A channel between parts on virtual time. Each transfer takes a random time, so that they overtake one another."""

    def __init__(self, plan: SplitPlan, runtime: VirtualRuntime, rng: random.Random) -> None:
        self.plan, self.runtime, self.rng = plan, runtime, rng
        self.sent: list[TensorTransfer] = []
        self.arrived: dict[TensorTransfer, asyncio.Future[Tensor]] = defaultdict(
            lambda: asyncio.get_running_loop().create_future()
        )

    async def send(self, transfer: TensorTransfer, tensor: Tensor) -> None:
        assert transfer not in self.sent
        self.sent.append(transfer)
        await self.runtime.sleep(self.rng.random())
        self.arrived[transfer].set_result(tensor.clone())

    async def receive(self, transfer: TensorTransfer) -> Tensor:
        tensor = await self.arrived[transfer]
        del self.arrived[transfer]
        return tensor

    def left(self) -> list[TensorTransfer]:
        """What has arrived, and was not received."""
        return list(self.arrived)


def run_parts(
    plan: SplitPlan,
    schedules: Sequence[Schedule],
    stages: Sequence[Stages],
    data: Callable[[str, int], Tensor],
    *,
    seed: int = 0,
    make_channel: Callable[..., VirtualChannel] = VirtualChannel,
    pausing: Sequence[TorchStages] = (),
) -> VirtualChannel:
    """Runs all parts on virtual time. Transfers take random times, and so do passes of `pausing`."""
    cluster, rng = VirtualCluster(seed), random.Random(seed)
    runtime = cluster.runtime("parts")
    channel = make_channel(plan, runtime, rng)

    async def pause() -> None:
        await runtime.sleep(rng.random())

    for each in pausing:
        each.pause = pause

    async def all_parts() -> None:
        works = []
        for part, schedule in enumerate(schedules):
            works.append(PipelineExecutor(plan, part, stages[part], channel, data).run(schedule))
        await runtime.gather(*works)

    cluster.run(all_parts())
    return channel
