"""The gradients of a pipeline: each part computes the passes of its schedule.

    minibatch ─ micro-batches ─▶ passes of the schedule ─▶ each part has its part of the gradient

The gradient is that of the whole minibatch: micro-batch m counts n_m / n where the loss is a mean, and 1 if it is a
sum. A run may let parts drop the activations of a forward pass, and compute them again before its backward.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from gradstream.collectives.schedule import cuts_of
from gradstream.errors import NonFiniteError
from gradstream.memory import Span, Vector
from gradstream.pipeline.executor import PipelineExecutor, TensorTransfer
from gradstream.pipeline.schedule import Schedule, StagePass, make_schedule
from gradstream.runtime.base import Report, Runtime, Work
from gradstream.runtime.tasks import interrupt_on_cancel
from gradstream.split.plan import DATA
from gradstream.split.saved import DroppedPass
from gradstream.split.stage_model import JoinedLoss, is_due
from gradstream.worker.computed import ComputedGradient
from gradstream.worker.config import WorkerConfig
from gradstream.worker.gradient import Looked
from gradstream.worker.parts.channel import PartChannel, as_it_was, as_sent, decoded, encoded
from gradstream.worker.parts.gradients import AgreedSource, Computed, LateValues, PartSource, Values, nothing
from gradstream.worker.parts.sockets import PartSockets

# ---- pass thread -------------------------------------------------------------------------
# `PassThread`: a part's passes one after the other in its thread of arithmetic, which waits for the other parts
# there.
#
# The event loop meanwhile asks parts that are silent for long whether they are there.


async def pass_thread(runtime: Runtime, channel: PartChannel) -> PassThread | None:
    """The thread of a part; None if its passes need the event loop, since there are no sockets to all parts.

    All parts call it at once.
    """
    sockets = channel.sockets
    if sockets is None or not await sockets.connect(channel.agree):
        return None
    return PassThread(runtime, channel, sockets)


class PassThread:
    """Carries out passes. Implements `pipeline.executor.TensorChannel` for them.

    Args:
        runtime: of the process.
        channel: to the other parts.
        sockets: of the channel.
    """

    def __init__(self, runtime: Runtime, channel: PartChannel, sockets: PartSockets) -> None:
        self._runtime = runtime
        self._channel = channel
        self._sockets = sockets

    async def run(
        self,
        passes: Callable[[Report], None],
        *,
        work: Work,
        reads: Sequence[Span],
        writes: Sequence[Span],
        on_progress: Report | None = None,
    ) -> None:
        """Carries out `passes` in the thread; see `Runtime.compute`. If it is cancelled, the sockets are closed first.

        Raises:
            PeerLostError, DeadlineError: another part was lost.
            BaseException: whatever a pass raises.
        """
        computing = self._runtime.compute(
            passes, work=work, reads=reads, writes=writes, on_progress=on_progress
        )
        watching = self._runtime.spawn(self._watch(), name=f"{self._runtime.node}-watches-parts")
        try:
            await interrupt_on_cancel(asyncio.ensure_future(computing), self._sockets.close)
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        """Asks a part for which the thread has waited all the time whether it is there."""
        before = None
        while True:
            await self._runtime.sleep(self._channel.silence_s)
            awaited = self._sockets.awaited
            if awaited is not None and awaited is before:
                try:
                    await self._channel.ask(*awaited)
                except Exception as error:
                    self._sockets.fail(error)
            before = awaited

    async def send(self, transfer: TensorTransfer, tensor: torch.Tensor) -> None:
        """See `TensorChannel`: the tensor must not change any more."""
        form = self._channel.form(transfer)
        flat = as_sent(tensor if form.codec is None else encoded(form.codec, tensor))
        if len(flat):
            self._sockets.send(transfer.target, form.tag, flat)

    async def receive(self, transfer: TensorTransfer) -> torch.Tensor:
        """See `TensorChannel`: waits in the thread."""
        form = self._channel.form(transfer)
        if not math.prod(form.shape):
            return torch.empty(form.shape, dtype=form.dtype)
        came = self._sockets.receive(transfer.source, form.tag, form.size_bytes, form.what)
        if form.codec is not None:
            return decoded(form.codec, came, form.shape, form.dtype)
        return as_it_was(came, form.shape, form.dtype)


# ---- pipelined ---------------------------------------------------------------------------


class PartGradients(AgreedSource):
    """The gradients of a pipeline, by a schedule that flushes."""

    def __init__(self, config: WorkerConfig, *place: Any) -> None:
        super().__init__(config, *place)
        self._micro_batches = config.plan.job.micro_batches
        self._schedule = self._scheduled(str(config.plan.job.pipeline))
        self._halves = any(step.kind == "weights" for step in self._schedule)
        self._recompute = config.plan.job.recompute

    def _scheduled(self, name: str) -> Schedule:
        """This part's passes for a whole minibatch."""
        return make_schedule(name, self.model.plan, self._micro_batches)[self.model.part]

    async def _compute(self, parameters: Vector, gradient: ComputedGradient) -> tuple[Computed, float]:
        num_samples, plan = gradient.batch.num_samples, self.model.plan
        cuts = cuts_of(num_samples, min(self._micro_batches, num_samples))
        sizes = [stop - start for start, stop in pairwise(cuts)]
        thread, early = await pass_thread(self._runtime, self._channel), self._leaves_early(gradient)
        data, read_s = (self._late(gradient, cuts), 0.0) if thread else await self._read(gradient, cuts)
        self._channel.sizes, schedule = sizes, self._schedule_of(len(sizes))
        drops = dropped(schedule) if self._recompute else ()
        passes = Passes(
            self, thread, parameters, gradient, sizes, halves=self._halves, drops=drops, early=early
        )
        executor = PipelineExecutor(
            plan, self.model.part, passes, thread or self._channel, data.of if data else nothing
        )
        await passes.carry_out(executor, schedule)
        return passes, data.read_s if isinstance(data, LateValues) else read_s

    def _late(self, gradient: ComputedGradient, cuts: Sequence[int]) -> LateValues | None:
        feed, ref = self._feed, gradient.batch.ref
        if feed is None:
            return None
        return LateValues(lambda: Values(self.model, feed.read(ref), cuts), self.meter)

    def _schedule_of(self, micro_batches: int) -> Schedule:
        """This part's passes, for a minibatch that may have fewer samples than there are micro-batches."""
        return [one for one in self._schedule if one.micro_batch < micro_batches]


def dropped(schedule: Schedule) -> Collection[StagePass]:
    """The forwards whose activations are worth dropping: all but those that their backward follows at once."""
    return {
        step
        for step, after in pairwise(schedule)
        if step.stage != DATA
        and step.kind == "forward"
        and after != StagePass("backward", step.stage, step.micro_batch)
    }


class Passes(Computed):
    """Implements `pipeline.executor.Stages` for one gradient.

    Args:
        source: computes the gradient.
        thread: in which the passes follow each other; None computes each from the event loop.
        parameters: of the part.
        gradient: the gradient.
        sizes: number of samples of each micro-batch.
        halves: the gradients of the weights are passes of their own.
        drops: the forwards that drop their activations, which are computed again before the backward.
        early: elements of the gradient may leave as they become final.
    """

    def __init__(
        self,
        source: PartSource,
        thread: PassThread | None,
        parameters: Vector,
        gradient: ComputedGradient,
        sizes: Sequence[int] | Mapping[int, int],
        *,
        halves: bool = False,
        drops: Collection[StagePass] = (),
        early: bool = False,
    ) -> None:
        super().__init__()
        self._early = early
        self._halves = halves
        self._drops = drops
        self._source = source
        self._thread = thread
        self._report: Report | None = None  # of the thread
        self._compute = source.meter.compute if thread is None else source.meter.compute_here
        self._parameters = parameters
        self._reads = [parameters.all]
        self._gradient = gradient
        self._sizes = sizes
        self._saved: dict[tuple[int, int], object] = {}
        self._written: set[int] = set()  # stages whose gradient has begun
        self._backwards = Counter[int]()  # by stage, how many it has done
        self._joined: JoinedLoss | None = None
        self._joined_step = -1  # of the minibatch whose loss `_joined` looks at

    async def carry_out(self, executor: PipelineExecutor, schedule: Schedule) -> None:
        """Carries out the next passes. Raises as `PipelineExecutor.run`."""
        if self._thread is None:
            await executor.run(schedule)
        else:
            gradient, vector = self._gradient, self._gradient.vector

            def compute(report: Report) -> None:
                self._report = report
                executor.run_in_thread(schedule)
                if self._early and not self.refused:
                    self._source.meter.count(lambda: Looked(gradient, report)(len(vector)))

            await self._thread.run(
                compute,
                work=Work("gradient", samples=gradient.samples, elems=len(vector)),
                reads=self._reads,
                writes=[vector.all],
                # Each report wakes the event loop, which takes the interpreter from the backward pass.
                on_progress=gradient.ready.advance if self._early and self._source.exchanges else None,
            )

    def weight(self, micro_batch: int) -> float:
        """The weight of a micro-batch in the gradient of its minibatch."""
        if self._source.model.reduction == "sum":
            return 1.0
        return self._sizes[micro_batch] / self._gradient.batch.num_samples

    def step_of(self, micro_batch: int) -> int:
        """The step of its minibatch."""
        del micro_batch
        return self._gradient.step

    def seed(self, micro_batch: int) -> int:
        """The seed of its random numbers."""
        return self._source.stage_seed(self._gradient.step, micro_batch)

    def read(self, stage: int, micro_batch: int) -> torch.Tensor:
        """The parameters of a stage that a forward reads."""
        del micro_batch
        return self._source.model.of_stage(stage, self._parameters.tensor)

    def add_loss(self, micro_batch: int, loss: float) -> None:
        """Adds a micro-batch's share of the loss."""
        del micro_batch
        self.loss = (self.loss or 0.0) + loss

    async def forward(
        self, stage: int, micro_batch: int, values: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `Stages`."""
        model = self._source.model
        seed, size = self.seed(micro_batch), self._sizes[micro_batch]
        parameters = self.read(stage, micro_batch)
        drop = StagePass("forward", stage, micro_batch) in self._drops
        joined = self._joined_loss(stage, micro_batch)

        def compute() -> tuple[dict[str, torch.Tensor], object]:
            try:
                return model.stages[stage].forward(
                    parameters,
                    values,
                    seed=seed,
                    samples=size,
                    halves=self._halves,
                    recompute=drop,
                    joined=joined,
                )
            except (
                NonFiniteError
            ) as error:  # of the loss: the other parts continue, and the gradient is refused
                self.refused = str(error)
                return {"loss": torch.tensor(math.nan)}, None

        outputs, saved = await self._compute(
            compute,
            work=Work("forward", samples=size, share=model.share(stage)),
            reads=self._reads,
        )
        self._saved[stage, micro_batch] = saved
        if "loss" in outputs:
            self.add_loss(micro_batch, self.weight(micro_batch) * float(outputs["loss"]))
        return outputs

    def _joined_loss(self, stage: int, micro_batch: int) -> JoinedLoss | None:
        """Who looks at the loss of the micro-batch's minibatch; None if nobody does."""
        model, step = self._source.model, self.step_of(micro_batch)
        if stage + 1 < len(model.plan.stages) or not is_due(step):
            return None
        if self._joined_step != step:
            self._joined, self._joined_step = model.stages[stage].joined_loss(), step
        return self._joined

    async def backward(
        self, stage: int, micro_batch: int, gradients: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `Stages`."""
        model = self._source.model
        saved, weight = self._saved.pop((stage, micro_batch)), self.weight(micro_batch)
        into = model.of_stage(stage, self._gradient.vector.tensor)
        if saved is None:
            return model.unknown(stage, self._sizes[micro_batch])
        size, share = self._sizes[micro_batch], model.share(stage)
        if isinstance(saved, DroppedPass):
            await self._compute(
                lambda: model.stages[stage].recompute(saved),
                work=Work("forward", samples=size, share=share),
                reads=self._reads,
            )
        if self._halves:
            self._saved[stage, micro_batch] = saved
            return await self._compute(
                lambda: model.stages[stage].backward_inputs(saved, gradients),
                work=Work("backward", samples=size, share=share / 2),
            )
        add = stage in self._written
        self._written.add(stage)
        self._backwards[stage] += 1
        gradient, place = self._gradient, model.place_of(stage)
        leaves = self._early and place.start == 0 and self._backwards[stage] == len(self._sizes)

        def compute(report: Report) -> Mapping[str, torch.Tensor]:
            looked = Looked(gradient, report) if leaves else None
            return model.stages[stage].backward(saved, gradients, into, weight=weight, add=add, report=looked)

        work = Work("backward", samples=size, share=share)
        if self._report is not None:
            return await self._compute(partial(compute, self._report), work=work)
        return await self._source.meter.compute_in_steps(
            compute,
            work=work,
            writes=[gradient.vector[place.start : place.stop]],
            milestones=model.stages[stage].layout.milestones,
            on_progress=gradient.ready.advance if leaves else None,
        )

    async def weights(self, stage: int, micro_batch: int) -> None:
        """See `Stages`."""
        model, saved = self._source.model, self._saved.pop((stage, micro_batch), None)
        if saved is None:  # the loss was not finite
            return
        into = model.of_stage(stage, self._gradient.vector.tensor)
        weight, add = self.weight(micro_batch), stage in self._written
        self._written.add(stage)
        await self._compute(
            lambda: model.stages[stage].backward_weights(saved, into, weight=weight, add=add),
            work=Work("backward", samples=self._sizes[micro_batch], share=model.share(stage) / 2),
            writes=[self._gradient.vector.all],
        )
