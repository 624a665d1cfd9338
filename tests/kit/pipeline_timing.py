"""How long a pipeline takes and each part idles: the real executor, on a virtual clock and without tensors."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gradstream.pipeline.executor import PipelineExecutor, TensorTransfer
from gradstream.pipeline.schedule import Kind, Schedule, StagePass
from gradstream.runtime.virtual import VirtualCluster, VirtualRuntime
from gradstream.split.plan import SplitPlan


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """The times of a pipeline.

    Args:
        finish_s: the time at which each pass ends, in seconds from the start.
        busy_s: seconds in which each part computes.
        total_s: seconds until all is done.
    """

    finish_s: Mapping[StagePass, float]
    busy_s: tuple[float, ...]
    total_s: float

    @property
    def idle(self) -> tuple[float, ...]:
        """The fraction of a minibatch's time in which each part does not compute, by part.

        With K equal stages, one a part, and M micro-batches, each is (K - 1) / (M + K - 1) under GPipe and 1F1B
        (Huang et al., 2019, section 2.3).
        """
        return tuple(1 - busy_s / self.total_s for busy_s in self.busy_s)

    @property
    def bottleneck(self) -> int:
        """The part that computes longest: no schedule is quicker than it is."""
        return self.busy_s.index(max(self.busy_s))


def pipeline_times(
    plan: SplitPlan,
    schedules: Sequence[Schedule],
    pass_s: Callable[[StagePass], float],
    transfer_s: Callable[[TensorTransfer], float] = lambda transfer: 0.0,
) -> PipelineTimes:
    """Runs the schedules of all parts on virtual time. Not from within a running event loop.

    Args:
        plan: plan of the split model.
        schedules: schedule of each part.
        pass_s: seconds of each pass.
        transfer_s: seconds of each transfer. Those from one part to another go one after the other; others, and
            passes, at the same time.
    """
    cluster = VirtualCluster(0)
    runtime = cluster.runtime("parts")
    timed, link = _TimedStages(plan, runtime, pass_s), _TimedLinks(runtime, transfer_s)

    async def all_parts() -> None:
        works = [
            PipelineExecutor(plan, part, timed, link, lambda name, number: _NOTHING).run(schedule)
            for part, schedule in enumerate(schedules)
        ]
        await runtime.gather(*works)

    cluster.run(all_parts())
    return PipelineTimes(timed.finish_s, tuple(timed.busy_s), runtime.now() / 1e9)


_NOTHING = torch.empty(0)


class _TimedStages:
    """Implements `Stages` of all parts: sleeps."""

    def __init__(
        self, plan: SplitPlan, runtime: VirtualRuntime, pass_s: Callable[[StagePass], float]
    ) -> None:
        self._plan, self._runtime, self._pass_s = plan, runtime, pass_s
        self.finish_s: dict[StagePass, float] = {}
        self.busy_s = [0.0] * plan.parts

    async def forward(
        self, stage: int, micro_batch: int, values: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        await self._sleep("forward", stage, micro_batch)
        return dict.fromkeys(self._plan.stages[stage].outputs, _NOTHING)

    async def backward(
        self, stage: int, micro_batch: int, gradients: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        await self._sleep("backward", stage, micro_batch)
        return dict.fromkeys(self._plan.stages[stage].inputs, _NOTHING)

    async def weights(self, stage: int, micro_batch: int) -> None:
        await self._sleep("weights", stage, micro_batch)

    async def _sleep(self, kind: Kind, stage: int, micro_batch: int) -> None:
        step = StagePass(kind, stage, micro_batch)
        seconds = self._pass_s(step)
        await self._runtime.sleep(seconds)
        self.busy_s[self._plan.stages[stage].part] += seconds
        self.finish_s[step] = self._runtime.now() / 1e9


class _TimedLinks:
    """Implements `TensorChannel`: the executor sends to each part one tensor after the other."""

    def __init__(self, runtime: VirtualRuntime, transfer_s: Callable[[TensorTransfer], float]) -> None:
        self._runtime, self._transfer_s = runtime, transfer_s
        self._arrived: dict[TensorTransfer, asyncio.Event] = defaultdict(asyncio.Event)

    async def send(self, transfer: TensorTransfer, tensor: torch.Tensor) -> None:
        await self._runtime.sleep(self._transfer_s(transfer))
        self._arrived[transfer].set()

    async def receive(self, transfer: TensorTransfer) -> torch.Tensor:
        await self._arrived[transfer].wait()
        del self._arrived[transfer]
        return _NOTHING
