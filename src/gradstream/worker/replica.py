"""A worker as its strategy sees it: one model replica with its minibatches and its gradients.

This module does not depend on the exchange topology. `server/` (a parameter server, with `rows.py` for exchanging only
changed rows), `group/` (a group of workers without servers), `pairs/` and `shared/` (one vector in shared memory) add
the operations of each. Minibatches and gradients come from the job's model and data, or from a user's loop: see
`BatchSchedule` and `GradientSource`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from gradstream.data.base import BatchRef
from gradstream.errors import UserCodeError
from gradstream.memory import Vector
from gradstream.model.base import Batch, Layout, Model
from gradstream.runtime.base import Runtime, Work, awaited_later
from gradstream.strategies import api
from gradstream.telemetry.events import ConvergedEvent, StepEvent
from gradstream.telemetry.meters import Stopwatch, WaitAttribution
from gradstream.worker.batch_gate import BatchGate, Gate
from gradstream.worker.computed import ComputedGradient, Observer, Refusals, Result, SampleBatch
from gradstream.worker.gradient import GradientSource, differentiate
from gradstream.worker.schedule import BatchSchedule, Schedule, ScheduleHooks
from gradstream.worker.updater import LocalRule

# ---- step meter --------------------------------------------------------------------------
# Measures a worker's steps, and makes an event of each.


class StepMeter:
    """Times a worker's steps, and collects the figures that are reported with each.

    Args:
        runtime: runtime of the worker's node.
        attribution: records for which nodes this worker had to wait.

    Attributes:
        result: figures of the gradient that was computed last.
        late: a shard dropped the current step's update because it came after its round.
    """

    def __init__(self, runtime: Runtime, attribution: WaitAttribution) -> None:
        self.result = Result(math.nan)
        self.late = False
        self._runtime = runtime
        self._stopwatch = Stopwatch(runtime.node, attribution, runtime.now())

    def now(self) -> int:
        """The node's clock, in nanoseconds."""
        return self._runtime.now()

    def begin(self, begun_ns: int | None = None) -> None:
        """A step begins, or began at `begun_ns`."""
        self._stopwatch.begin(self._runtime.now() if begun_ns is None else begun_ns)

    def computed(self, begun_ns: int, result: Result) -> None:
        """A gradient has been computed since `begun_ns`."""
        self.result = result
        self._stopwatch.computed(begun_ns, self._runtime.now())

    def worked(self, begun_ns: int) -> None:
        """The worker has waited for other arithmetic (a sum, a local step) since `begun_ns`."""
        self._stopwatch.worked(begun_ns, self._runtime.now())

    def event(self, rank: int, step: int, batch: SampleBatch, lr: float) -> StepEvent:
        """The report of a step that ends now.

        Args:
            rank: rank of the worker.
            step: number of the step.
            batch: the minibatch of the step.
            lr: its learning rate.
        """
        late, self.late = self.late, False
        *parts, square = self.result.squares or (None,)
        now_ns = self._runtime.now()
        times = self._stopwatch.times(now_ns)
        self._stopwatch.begin(now_ns)  # unless `begin` is called, the next step begins here
        return StepEvent(
            rank=rank,
            step=step,
            epoch=batch.ref.epoch,
            samples=batch.num_samples,
            loss=self.result.loss,
            lr=lr,
            gradient_norm=self.result.norm,
            part_squares=math.fsum(parts) / len(parts) if parts else None,
            square=square,
            late=late,
            read_s=batch.read_s + (self.result.read_s if batch.num_samples else 0.0),
            **times,
        )


# ---- pausable gate -----------------------------------------------------------------------
# Whether a worker may begin a minibatch, and whether others wait for it.


class PausableGate:
    """Takes a worker through the gate before each minibatch, and pauses it while it has nothing to do.

    Nobody waits for a paused worker: neither for its clock nor for its updates.

    Args:
        gate: the gate.
        meter: told when a step begins, including its wait for clocks.
        flush: returns when everything that the worker has computed is in the model.
        server: told when the worker is paused and resumed; None if it cannot be paused.
        before: awaited before each minibatch, to wait for the clocks of other workers.
        waited_for: updates wait for this worker.
        late: the worker joined after training had begun, so nobody waits for it before it resumes.

    Attributes:
        between: the worker is between two minibatches.
        resumed: the worker was paused before its current minibatch.
    """

    def __init__(
        self,
        gate: BatchGate,
        meter: StepMeter,
        flush: Callable[[], Awaitable[None]],
        server: api.Server | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
        waited_for: bool = False,
        late: bool = False,
    ) -> None:
        self.between = True
        self.resumed = False
        self.waited_for = waited_for
        self._gate = gate
        self._meter = meter
        self._flush = flush
        self._server = server
        self._before = before
        self._paused = late and (waited_for or before is not None)

    async def enter(self) -> Gate:
        """Returns when the worker may begin its next minibatch, or knows that it will not: see `BatchGate.gate`."""
        self.between = True
        begun_ns = None
        if self._before is not None:
            begun_ns = self._meter.now()
            await self.resume()
            await self._before()
        gate = await self._gate.gate(self.stand)
        if gate == "go":
            self.between = False
            self._meter.begin(begun_ns)
        elif self._before is not None:
            await self._pause()
        return gate

    async def stand(self) -> None:
        """Flushes everything into the model: the worker stands still until it passes the gate again."""
        if self._gate.flush_others is not None:
            await self._gate.flush_others()
        await self._flush()
        if self.waited_for:
            await self._pause()
        self._gate.stand()

    async def leave(self) -> None:
        """Notes that the worker has no more minibatches, so no clock waits for it."""
        if self._before is not None:
            await self._pause()

    async def resume(self) -> None:
        """Others wait for the worker from now on."""
        self.resumed, self._paused = self._paused, False
        if self.resumed:
            assert self._server is not None
            await self._server.resume()

    async def _pause(self) -> None:
        if not self._paused:
            assert self._server is not None
            self._paused = True
            await self._server.pause()


# ---- base --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaContext:
    """What every replica needs, in any topology.

    Args:
        runtime: runtime of the worker's node.
        model: the worker's own instance of the model.
        schedule: the worker's minibatches.
        gradients: computes the gradient of a minibatch.
        rank: rank of the worker.
        num_workers: number of workers, W.
        rule: the update rule, for steps that the worker makes itself.
        batch_gate: asked before each minibatch whether the worker may begin it.
        joins: whether a minibatch has several parts (`accumulate`), whose gradients are summed in another vector.
        first_step: number of the first step; above 0 in a resumed run.
        on_receipt: called with minibatches that are now in the model.
        on_step: called with the event of each step.
        on_boundary: awaited between two minibatches, while the parameters do not change, with the replica and the
            minibatches since the last call, including those of rounds that the worker missed.
        refusals: refuses gradients that are not finite.
        watch: called for each gradient and each update.
        late: whether the worker joined after training had begun.
        on_converged: called when the strategy reports that it has ended.
    """

    runtime: Runtime
    model: Model
    schedule: BatchSchedule
    gradients: GradientSource
    rank: int
    num_workers: int
    rule: LocalRule
    batch_gate: BatchGate
    joins: bool
    first_step: int
    on_receipt: Callable[[Sequence[BatchRef]], None]
    on_step: Callable[[StepEvent], None]
    on_boundary: Callable[[Replica, Sequence[BatchRef]], Awaitable[None]]
    refusals: Refusals = field(default_factory=Refusals)
    watch: Observer = field(default_factory=Observer)
    late: bool = False
    on_converged: Callable[[ConvergedEvent], None] = lambda event: None


class Replica(ABC):
    """Implements `strategies.api.Worker`.

    Args:
        context: parts of every replica.
        allocate: allocates a vector: (elems, dtype, name, lead_bytes=).
        attribution: records for which nodes this worker has waited.
        parameters: the worker's parameters; None allocates them.

    Attributes:
        samples: number of samples that the worker has gone through.
        evaluated: see `strategies.api.Worker`.
        has_computed: whether the worker has computed a gradient.
    """

    def __init__(
        self,
        context: ReplicaContext,
        allocate: Callable[..., Vector],
        attribution: WaitAttribution,
        parameters: Vector | None = None,
    ) -> None:
        self.rank = context.rank
        self.num_workers = context.num_workers
        self.reduction = context.model.reduction
        self.step = context.first_step
        self.samples = 0
        self._ahead_samples = 0
        self._converged = False
        self.has_computed = False
        self.evaluated = ""
        self.version = -1  # there are no parameters yet
        self._context = context
        self._runtime = context.runtime
        self._gradients = context.gradients
        self._layout = context.model.layout
        self.parameters = (
            vector_of(self._layout, allocate, "parameters") if parameters is None else parameters
        )
        self._gradient = vector_of(self._landing, allocate, "gradient")
        self._part_sums = vector_of(self._landing, allocate, "sums") if context.joins else None
        self._unpushed: dict[BatchRef, None] = {}  # minibatches begun that are in no update yet
        self._meter = StepMeter(context.runtime, attribution)
        self._pausable_gate = PausableGate(context.batch_gate, self._meter, self._flush)

    @property
    def seen_samples(self) -> int:
        """`samples`, plus those of a minibatch with a gradient that is not over yet: the buffers have seen both.

        Other workers may have the sum of a round before this one does.
        """
        return self.samples + self._ahead_samples

    @property
    def _landing(self) -> Layout:
        """Layout of the vectors that gradients are written into."""
        return self._layout

    def retire(self) -> None:
        """Frees all memory but the parameters. The strategy can no longer use the replica."""
        self._gradient, self._part_sums = Vector("nothing", torch.empty(0)), None

    def away(self) -> AbstractContextManager[object]:
        """While a user's loop waits for what others do: they do not wait for this worker."""
        return nullcontext()

    @abstractmethod
    async def newest(self) -> torch.Tensor:
        """The current parameters (E,) of the common model, read-only."""

    @abstractmethod
    async def _flush(self) -> None:
        """Waits until everything that this worker has computed is in the model."""

    def _memory_free(self, *, mean: bool) -> Coroutine[Any, Any, None] | None:
        """Waits until the next gradient may be written into its vector; None if it may be now."""
        del mean
        return None

    # ---- minibatches --------------------------------------------------------------------

    async def batches(self) -> AsyncIterator[api.Minibatch]:
        """See `strategies.api.Worker`."""
        context, schedule, pausable_gate = self._context, self._context.schedule, self._pausable_gate
        hooks = ScheduleHooks(
            gate=pausable_gate.enter,
            close=self._close,
            skip=self.skip_missed,
            done=self.step - context.first_step,
        )
        async with aclosing(schedule.refs(hooks)) as refs:
            async for ref in refs:
                size = schedule.size(ref)
                batch = await self._read(ref) if size is None else SampleBatch(ref, size)
                self._unpushed[ref] = None
                if pausable_gate.waited_for:
                    await pausable_gate.resume()
                yield batch
                if schedule.passed(batch):
                    context.on_step(self._meter.event(self.rank, self.step, batch, schedule.rate(ref)))
                self.step += 1
                self.samples += batch.num_samples
                self._ahead_samples = 0
                await context.on_boundary(self, [ref, *self._missed()])

    def _missed(self) -> Sequence[BatchRef]:
        return self._context.schedule.missed(self.step - self._context.first_step, self.version)

    def skip_missed(self) -> int:
        """Skips the minibatches of rounds that were made without this worker; returns their number."""
        missed = len(self._missed())
        self.step += missed
        self._context.batch_gate.skip(missed)
        return missed

    async def _read(self, ref: BatchRef) -> SampleBatch:
        """Reads a minibatch of a stream, whose number of samples is unknown before that."""
        context = self._context
        assert isinstance(context.schedule, Schedule)
        likely, begun_ns = context.schedule.plan.likely_size(ref), self._runtime.now()
        unread: tuple[Batch, ...] = (Batch(None, None, likely, np.empty(0, np.int64)),)
        samples = await self._runtime.compute(
            lambda _: self._gradients.read(ref, self.step),
            work=Work("read", samples=likely),
            shape_only=unread,
        )
        read_s = (self._runtime.now() - begun_ns) / 1e9
        return SampleBatch(ref, sum(part.num_samples for part in samples), samples, read_s)

    async def _close(self) -> None:
        """Flushes everything into the model when no minibatch is left, and checks that."""
        await self._pausable_gate.stand()
        if self._unpushed:  # no other worker would compute them, so the run would never end
            raise UserCodeError(
                f"worker-{self.rank}: {len(self._unpushed)} of its {self.step} minibatches were never pushed, "
                f"{next(iter(self._unpushed))} for one: a strategy must push the gradient of each minibatch, "
                "by update(), accumulate() or optimize()"
            )
        await self._pausable_gate.leave()

    def _handed_out(self, refs: Sequence[BatchRef]) -> Callable[[], None]:
        """Notes that an update has these minibatches. Returns a callback for when the server has the update."""
        for ref in refs:
            self._unpushed.pop(ref, None)
        return partial(self._context.on_receipt, refs)

    # ---- gradients ----------------------------------------------------------------------

    async def gradient(self, batch: api.Minibatch) -> ComputedGradient:
        """See `strategies.api.Worker`."""
        gradient = self._start(batch, mean=True)
        await gradient.done()
        return gradient

    def gradient_soon(self, batch: api.Minibatch) -> ComputedGradient:
        """See `strategies.api.Worker`."""
        return self._start(batch, mean=False)

    def _start(self, batch: api.Minibatch, *, mean: bool) -> ComputedGradient:
        assert isinstance(batch, SampleBatch)
        gradient = self._new_gradient(batch, mean=mean)
        if gradient.samples:
            work = self._compute(gradient, self._memory_free(mean=mean))
            name = f"worker-{self.rank}-gradient-{self.step}"
            gradient.task = awaited_later(self._runtime.spawn(work, name=name))
        return gradient

    def _new_gradient(self, batch: SampleBatch, *, mean: bool) -> ComputedGradient:
        """A gradient to be computed in this replica's memory."""
        rate = self._context.schedule.rate(batch.ref)
        return ComputedGradient(self._gradient, batch, rate, self.step, mean, self._part_sums)

    async def converged(self, reason: str, loss: float) -> None:
        """See `strategies.api.Worker`."""
        if not self._converged:
            self._converged = True
            self._context.on_converged(ConvergedEvent(rank=self.rank, reason=reason, loss=loss))
        await self._context.batch_gate.asked()

    def _mean_loss(self, gradient: ComputedGradient) -> float:
        """The mean loss over the samples of the gradient that was computed last."""
        per_sample = gradient.samples if self.reduction == "sum" else 1
        return self._meter.result.loss / (per_sample or 1)

    async def _compute(self, gradient: ComputedGradient, free: Awaitable[None] | None) -> Result:
        source, batch = self._gradients, gradient.batch
        try:
            if free is not None:
                await free
            parameters, begun_ns = self.parameters, self._runtime.now()
            result = await differentiate(self._runtime, source, parameters, gradient)
            self.has_computed = True
            if result.refused:
                self._context.refusals.refuse(gradient, result.refused)
            else:
                self._context.refusals.passed()
        except BaseException as error:
            gradient.ready.fail(error)
            raise
        if gradient.step == self.step:
            self._ahead_samples = max(0, gradient.samples)
        self._meter.computed(begun_ns, result)
        self._context.watch.computed(self.rank, batch.ref, gradient.step, result.loss)
        return result


def vector_of(layout: Layout, allocate: Callable[..., Vector], name: str) -> Vector:
    """Allocates a vector of this layout."""
    return allocate(layout.elems, layout.dtype, name, lead_bytes=layout.lead_bytes)
