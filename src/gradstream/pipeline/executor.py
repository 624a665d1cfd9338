"""Carries out one part's schedule: computes its passes in order, and sends each result to the parts that use it.

The executor moves values and their gradients, and knows no weights. What a pass computes is the caller's `Stages`,
how tensors travel is the caller's `Channel`. Sums of gradients are made in a fixed order, so that the order of
arrival has no effect on their bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from gradstream.errors import InternalError
from gradstream.pipeline.schedule import Schedule, StagePass
from gradstream.runtime.base import gather
from gradstream.runtime.tasks import let_others_run
from gradstream.split.plan import DATA, SplitPlan, Stage, Value


class Stages(Protocol):
    """What a part computes.

    Its `backward` weighs each micro-batch by its share of the minibatch's samples, so that the sum is the mean. To
    compute activations again instead of keeping them (GPipe), it keeps the inputs of `forward`, and repeats it in
    `backward`, with the same random numbers: schedules and transfers stay the same.
    """

    async def forward(
        self, stage: int, micro_batch: int, values: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The outputs of a stage, by name, from its inputs. Keeps what the backward needs."""
        ...

    async def backward(
        self, stage: int, micro_batch: int, gradients: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The gradients of all inputs that have one, from those of the outputs that have one.

        It adds the gradient of the weights to the part's own, unless the schedule has `weights` passes.
        """
        ...

    async def weights(self, stage: int, micro_batch: int) -> None:
        """Adds the gradient of the weights, which the backward of the micro-batch has skipped."""
        ...


@dataclass(frozen=True, slots=True)
class TensorTransfer:
    """What travels: the same on both sides, and once in a run of a schedule.

    Args:
        value: name of the value.
        micro_batch: number of the micro-batch.
        source: the part that sends.
        target: the part that receives.
        gradient: the value's gradient travels back, instead of the value.
        samples: number of samples that travel; None for all of the micro-batch.
    """

    value: str
    micro_batch: int
    source: int
    target: int
    gradient: bool
    samples: int | None = None


class TensorChannel(Protocol):
    """Carries tensors between the parts."""

    async def send(self, transfer: TensorTransfer, tensor: torch.Tensor) -> None:
        """Returns when the tensor may be reused. Does not wait until the other part asks for it."""
        ...

    async def receive(self, transfer: TensorTransfer) -> torch.Tensor:
        """The tensor. It may be asked for in another order than it was sent."""
        ...


class PipelineExecutor:
    """Carries out the schedule of one part, which may come piece by piece. Sends continue while it computes.

    It holds the tensors of a part between its passes: each until the last use on this part.

    Args:
        plan: plan of the split model.
        part: number of this part.
        stages: computes the passes.
        channel: leads to the other parts.
        data: (name, micro-batch) → value of the minibatch, on part 0. Called once for each use: return a view.
    """

    def __init__(
        self,
        plan: SplitPlan,
        part: int,
        stages: Stages,
        channel: TensorChannel,
        data: Callable[[str, int], torch.Tensor],
    ) -> None:
        self._plan, self._part, self._stages, self._channel, self._data = plan, part, stages, channel, data
        self._values = {value.name: value for value in plan.values}
        self._users = {
            name: [stage.number for stage in plan.stages_of(part) if name in stage.inputs]
            for name in self._values
        }
        self._held: dict[tuple[str, int], tuple[torch.Tensor, int]] = {}  # and the number of uses to come
        self._gradients: dict[
            tuple[str, int], dict[int, torch.Tensor]
        ] = {}  # by the stage that used the value
        self._outgoing: dict[int, asyncio.Queue[tuple[TensorTransfer, torch.Tensor] | None]] = {
            other: asyncio.Queue() for other in range(plan.parts) if other != part
        }
        self._post: Callable[[TensorTransfer, torch.Tensor], Awaitable[None]] = self._enqueue

    async def run(self, schedule: Schedule) -> None:
        """Carries out the next passes.

        Raises:
            InternalError: `stages` leaves out a value or a gradient.
            BaseException: whatever `stages` or `channel` raises. The rest is cancelled first.
        """
        self._post = self._enqueue

        async def compute() -> None:
            await self._compute(schedule)
            for queue in self._outgoing.values():
                queue.put_nowait(None)

        await gather(compute(), *map(self._send_all, self._outgoing))

    def run_in_thread(self, schedule: Schedule) -> None:
        """As `run`, in the calling thread, without an event loop: for stages and a channel that block it.

        Raises:
            InternalError: the stages or the channel wait for an event loop.
        """
        self._post = self._channel.send
        computing = self._compute(schedule)
        try:
            while computing.send(None) is None:
                pass  # `let_others_run`: there are no others
        except StopIteration:
            return
        computing.close()
        raise InternalError(f"part {self._part} waits for an event loop in a thread that has none")

    async def _enqueue(self, transfer: TensorTransfer, tensor: torch.Tensor) -> None:
        self._outgoing[transfer.target].put_nowait((transfer, tensor))

    async def _compute(self, schedule: Schedule) -> None:
        for step in schedule:
            if step.stage == DATA:
                for value in self._plan.values:
                    if value.source == DATA and self._plan.parts_using(value):
                        await self._send(value, step.micro_batch, self._data(value.name, step.micro_batch))
            elif step.kind == "forward":
                await self._forward(self._plan.stages[step.stage], step.micro_batch)
            elif step.kind == "backward":
                await self._backward(self._plan.stages[step.stage], step.micro_batch)
            else:
                await self._stages.weights(step.stage, step.micro_batch)
            await let_others_run()  # sends begin now, also where `stages` computes without ever waiting

    async def _send_all(self, target: int) -> None:
        while (outgoing := await self._outgoing[target].get()) is not None:
            await self._channel.send(*outgoing)

    async def _forward(self, stage: Stage, micro_batch: int) -> None:
        inputs = {name: await self._take(self._values[name], micro_batch) for name in stage.inputs}
        outputs = await self._stages.forward(stage.number, micro_batch, inputs)
        for name in stage.outputs:
            tensor = _get(outputs, name, StagePass("forward", stage.number, micro_batch))
            await self._send(self._values[name], micro_batch, tensor)
            if self._users[name]:
                self._held[name, micro_batch] = tensor, len(self._users[name])

    async def _send(self, value: Value, micro_batch: int, tensor: torch.Tensor) -> None:
        for other in self._plan.parts_using(value):
            transfer = TensorTransfer(value.name, micro_batch, self._part, other, gradient=False)
            await self._post(transfer, tensor)

    async def _take(self, value: Value, micro_batch: int) -> torch.Tensor:
        """The value for one of the stages that use it here."""
        source, key = self._plan.part_of(value), (value.name, micro_batch)
        if value.source == DATA and source == self._part:
            return self._data(*key)
        if key in self._held:
            tensor, uses = self._held.pop(key)
        else:
            tensor = await self._channel.receive(TensorTransfer(*key, source, self._part, gradient=False))
            uses = len(self._users[value.name])
        if uses > 1:
            self._held[key] = tensor, uses - 1
        return tensor

    async def _backward(self, stage: Stage, micro_batch: int) -> None:
        values = [self._values[name] for name in stage.outputs]
        gradients = {v.name: await self._gradient(v, micro_batch) for v in values if v.has_gradient}
        returned = await self._stages.backward(stage.number, micro_batch, gradients)
        for value in (self._values[name] for name in stage.inputs):
            if value.has_gradient:
                tensor = _get(returned, value.name, StagePass("backward", stage.number, micro_batch))
                await self._return(value, micro_batch, stage.number, tensor)

    async def _return(self, value: Value, micro_batch: int, user: int, tensor: torch.Tensor) -> None:
        """Notes the gradient from one of the stages that used a value here; the last sends the sum home."""
        key, home = (value.name, micro_batch), self._plan.part_of(value)
        self._gradients.setdefault(key, {})[user] = tensor
        if home != self._part and len(self._gradients[key]) == len(self._users[value.name]):
            transfer = TensorTransfer(*key, self._part, home, gradient=True)
            await self._post(transfer, self._own_sum(value, micro_batch))

    def _own_sum(self, value: Value, micro_batch: int) -> torch.Tensor:
        gradients = self._gradients.pop((value.name, micro_batch))
        return _sum([gradients[user] for user in self._users[value.name]])

    async def _gradient(self, value: Value, micro_batch: int) -> torch.Tensor:
        """The gradient of a value that was made here: the sum over the parts that used it, in their order."""
        sums: list[torch.Tensor] = []
        own = [self._part] if self._users[value.name] else []
        for other in sorted([*self._plan.parts_using(value), *own]):
            if other == self._part:
                sums.append(self._own_sum(value, micro_batch))
            else:
                transfer = TensorTransfer(value.name, micro_batch, other, self._part, gradient=True)
                sums.append(await self._channel.receive(transfer))
        return _sum(sums)


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _get(tensors: Mapping[str, torch.Tensor], name: str, step: StagePass) -> torch.Tensor:
    if name not in tensors:
        raise InternalError(f"{step} gave {sorted(tensors)}: the plan expects {name!r} too")
    return tensors[name]
