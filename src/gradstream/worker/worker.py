"""The worker: one model replica's memory, compute and verbs, as a strategy sees them.

Four vectors: parameters, spare (where the next fetch lands), gradient, accumulated; or, with momentum
and fetches that nobody computes beside, velocity instead of the spare one. They change roles instead
of being copied: adopting a fetch swaps parameters and spare, refreshing swaps parameters and
gradient, accumulating the first gradient of a period swaps the last two.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from gradstream.data.base import BatchRef
from gradstream.errors import UserCodeError
from gradstream.events import StepEvent
from gradstream.memory import Vector
from gradstream.model.base import Layout
from gradstream.model.batch import Batch
from gradstream.optim.schedules import Rate, nominal_rate, rate_at
from gradstream.runtime.base import Progress, Runtime, Work, awaited_later
from gradstream.server.client import Arrival, ServerClient, Update
from gradstream.strategies import base
from gradstream.worker.gradient import GradientSource, Result
from gradstream.worker.pace import Pace
from gradstream.worker.schedule import OpenSchedule, Schedule
from gradstream.worker.stopwatch import Stopwatch

__all__ = ["ComputedGradient", "LocalStep", "Replica", "SampleBatch"]

BLOCK_ELEMS = 1 << 17  # of four float32 vectors: 2 MiB


@dataclass(slots=True)
class SampleBatch:
    """A minibatch by name and size; its samples are read where the gradient is computed.

    Those of a stream have been read already: only so is their number known. It is `UNKNOWN` until the
    gradient is there where a loop of the user's computes it.
    """

    ref: BatchRef
    num_samples: int
    samples: tuple[Batch, ...] | None = None


@dataclass(slots=True)
class ComputedGradient:
    """A gradient that is being computed into `vector`, or has been; `lr` is its minibatch's learning rate."""

    vector: Vector
    batch: SampleBatch
    refs: tuple[BatchRef, ...]
    lr: float
    ready: Progress = field(default_factory=Progress)
    task: asyncio.Task[Result] | None = None

    @property
    def samples(self) -> int:
        """Training samples behind it; may be `UNKNOWN` until it is done."""
        return self.batch.num_samples

    async def done(self) -> None:
        """See `strategies.base.Gradient`."""
        if self.task is not None:
            await asyncio.shield(self.task)


@dataclass(frozen=True, slots=True)
class LocalStep:
    """v ← momentum·v + g;  acc ← acc + v;  w ← w - lr·v, in blocks that stay in the processor's cache.

    Without a velocity v is g. One operation after the other over whole vectors would move each of them
    through memory again: at 74.77 M elements a step is bound by that.

    Args:
        lr: α.
        momentum: of v, 0 to 1.
        second: the step before was the first of its period: acc ← v, as that left it, before all else.
    """

    lr: float
    momentum: float = 0.0
    second: bool = False

    def __call__(
        self,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        accumulated: torch.Tensor | None,
        velocity: torch.Tensor | None,
    ) -> None:
        """All of one shape, (elems,); changes all but the gradient."""
        for start in range(0, len(gradient), BLOCK_ELEMS):
            block = slice(start, start + BLOCK_ELEMS)  # vector registers see the same elements as uncut
            direction = gradient[block]
            if velocity is not None:
                if accumulated is not None and self.second:
                    accumulated[block].copy_(velocity[block])
                direction = velocity[block].mul_(self.momentum).add_(direction)
            if accumulated is not None:
                accumulated[block].add_(direction)
            parameters[block].add_(direction, alpha=-self.lr)


class Replica:
    """Implements `strategies.base.Worker`.

    Args:
        runtime: of this node.
        layout: of the model's flat vector.
        differentiator: computes gradients.
        schedule: which minibatches are this worker's.
        server: client of the parameter server, with a spare vector.
        rank: of this worker.
        num_workers: W.
        lr: learning rate, or a schedule of it; the rate is sent with each push.
        joins: whether minibatches have several parts, whose gradients are summed up in one more vector.
        pace: lets it begin each minibatch.
        first_step: number of its first minibatch; not 0 where the run is resumed.
        on_receipt: told which minibatches are in the model, once their push is acknowledged.
        on_step: told of each step.
        on_boundary: awaited between a minibatch and the next one, with this replica: its parameters
            stand still, as the strategy has left them.
    """

    def __init__(
        self,
        runtime: Runtime,
        layout: Layout,
        differentiator: GradientSource,
        schedule: Schedule | OpenSchedule,
        server: ServerClient,
        *,
        rank: int,
        num_workers: int,
        lr: Rate,
        joins: bool,
        pace: Pace,
        first_step: int = 0,
        on_receipt: Callable[[Sequence[BatchRef]], None],
        on_step: Callable[[StepEvent], None],
        on_boundary: Callable[[Replica, BatchRef], Awaitable[None]],
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self.step = first_step
        self.samples = 0  # gone through
        self.version = -1  # nothing adopted yet
        self.server = server
        self._runtime = runtime
        self._layout = layout
        self._differentiator = differentiator
        self._schedule = schedule
        self._pace = pace
        self._lr = lr
        self._on_receipt = on_receipt
        self._on_step = on_step
        self._on_boundary = on_boundary
        self._basis: Sequence[int] = [0] * server.chunks.num_chunks
        self.parameters = self._allocate("parameters")
        self._gradient = self._allocate("gradient")
        self._sums = self._allocate("sums") if joins else None
        self._accumulated: Vector | None = None  # allocated by the first strategy that accumulates
        self._velocity: Vector | None = None  # allocated by the first local step with momentum
        self._taken = Update(None, 0, 0.0, self._basis, num_gradients=0)
        self._refs: list[BatchRef] = []
        self._owed: dict[BatchRef, None] = {}  # begun, and in no update yet
        self._stopwatch = Stopwatch(runtime.node, server.claims, runtime.now())
        self._result = Result(math.nan)

    def _allocate(self, name: str) -> Vector:
        return self._runtime.memory.allocate(self._layout.elems, self._layout.dtype, name)

    @property
    def progress(self) -> tuple[int, int]:
        """Samples and minibatches behind it, those before the run was resumed included."""
        return self.samples, self.step

    def retire(self) -> None:
        """Gives back all memory but the parameters. No verb can be used any more."""
        nothing = Vector("nothing", torch.empty(0))
        self._gradient, self._accumulated, self._velocity, self.server.spare = nothing, None, None, None
        self._sums = None
        self._taken.vector = None

    # ---- batches ------------------------------------------------------------------------

    async def batches(self) -> AsyncIterator[base.Minibatch]:
        """See `strategies.base.Worker`."""
        async with aclosing(self._schedule.refs(self._close)) as refs:
            async for ref in refs:
                if not await self._pace.gate(self._flush):
                    return
                self._stopwatch.begin(self._runtime.now())
                batch = await self._named(ref)
                self._owed[ref] = None
                yield batch
                self._report(batch)
                self.step += 1
                self.samples += batch.num_samples
                await self._on_boundary(self, ref)

    async def _named(self, ref: BatchRef) -> SampleBatch:
        assert isinstance(self._schedule, Schedule)
        plan = self._schedule.plan
        size = plan.size(ref)
        if size is not None:
            return SampleBatch(ref, size)
        likely = plan.likely_size(ref)
        unread: tuple[Batch, ...] = (Batch(None, None, likely, np.empty(0, np.int64)),)
        samples = await self._runtime.compute(
            lambda _: self._differentiator.read(ref, self.step),
            work=Work("read", samples=likely),
            phantom=unread,
        )
        return SampleBatch(ref, sum(part.num_samples for part in samples), samples)

    async def _flush(self) -> None:
        """Everything this worker has computed is in the model, and receipts are on their way."""
        if self._taken.num_gradients or self._refs:  # a gradient of no samples needs its receipt all the same
            await self.server.push_soon(self.take_accumulated())
        await self.server.settle()
        self._pace.stand()

    async def _close(self) -> None:
        """The same, and no minibatch is missing in it: the end of the run is waited for next."""
        await self._flush()
        if self._owed:  # nobody else goes through them: all would wait for ever
            raise UserCodeError(
                f"worker-{self.rank}: {len(self._owed)} of its {self.step} minibatches were never pushed, "
                f"{next(iter(self._owed))} for one: a strategy must push the gradient of each minibatch, "
                "by update() or accumulate()"
            )

    def _handed_out(self, refs: Sequence[BatchRef]) -> Callable[[], None]:
        """These are in an update. What to call when it has been acknowledged."""
        for ref in refs:
            self._owed.pop(ref, None)
        return partial(self._on_receipt, refs)

    def _report(self, batch: SampleBatch) -> None:
        event = StepEvent(
            rank=self.rank,
            step=self.step,
            epoch=batch.ref.epoch,
            samples=batch.num_samples,
            loss=self._result.loss,
            lr=self._rate(batch.ref),
            gradient_norm=self._result.norm,
            **self._stopwatch.times(self._runtime.now()),
        )
        self._on_step(event)

    def _rate(self, ref: BatchRef) -> float:
        assert isinstance(self._schedule, Schedule)
        return rate_at(self._lr, self._schedule.position(ref))

    # ---- gradients ----------------------------------------------------------------------

    async def gradient(self, batch: base.Minibatch) -> ComputedGradient:
        """See `strategies.base.Worker`."""
        gradient = self._start(batch, mean=True)
        await gradient.done()
        return gradient

    def gradient_soon(self, batch: base.Minibatch) -> ComputedGradient:
        """See `strategies.base.Worker`."""
        return self._start(batch, mean=False)

    def _start(self, batch: base.Minibatch, *, mean: bool) -> ComputedGradient:
        assert isinstance(batch, SampleBatch)
        rate = self._rate(batch.ref)
        gradient = ComputedGradient(self._gradient, batch, (batch.ref,), rate)
        if batch.num_samples:
            # Not accumulated, the vector is the one that the push before may still be reading.
            work = self._compute(batch, gradient, None if mean else self.server.settle(), mean=mean)
            name = f"worker-{self.rank}-gradient-{self.step}"
            gradient.task = awaited_later(self._runtime.spawn(work, name=name))
        return gradient

    async def _compute(
        self,
        batch: SampleBatch,
        gradient: ComputedGradient,
        free: Awaitable[None] | None,
        *,
        mean: bool,
    ) -> Result:
        try:
            if free is not None:
                await free
            begun_ns = self._runtime.now()
            self._result = await self._runtime.compute(
                lambda report: self._differentiator.gradient(
                    self.parameters.tensor,
                    batch.ref,
                    gradient.vector.tensor,
                    num_samples=batch.num_samples,
                    step=self.step,
                    mean=mean,
                    report=report,
                    samples=batch.samples,
                    sums=None if self._sums is None else self._sums.tensor,
                ),
                work=Work("gradient", samples=batch.num_samples, elems=len(gradient.vector)),
                reads=[self.parameters.all],
                writes=[gradient.vector.all],
                milestones=self._differentiator.milestones(mean=mean),
                on_progress=gradient.ready.advance,
                phantom=Result(math.nan),
            )
        except BaseException as error:
            gradient.ready.fail(error)
            raise
        self._stopwatch.computed(begun_ns, self._runtime.now())
        return self._result

    # ---- exchange -----------------------------------------------------------------------

    async def adopt(self, arrival: Arrival) -> None:
        """See `strategies.base.Worker`."""
        await arrival.done()
        self.server.spare, self.parameters = self.parameters, arrival.vector
        self.server.spare.name, self.parameters.name = "spare", "parameters"
        self._computes_on(arrival.versions)

    async def refresh(self) -> None:
        """See `strategies.base.Worker`."""
        spare, self.server.spare = self.server.spare, self._gradient
        arrival = self.server.fetch_soon()
        await arrival.done()
        self._gradient, self.parameters, self.server.spare = self.parameters, arrival.vector, spare
        self._gradient.name, self.parameters.name = "gradient", "parameters"
        self._computes_on(arrival.versions)

    def _computes_on(self, versions: Sequence[int]) -> None:
        self._basis = versions
        self.version = min(versions, default=0)

    async def apply(self, gradient: base.Gradient, lr: float | None = None) -> None:
        """See `strategies.base.Worker`."""
        if not gradient.samples:
            return
        rate = self._local_rate(gradient, lr)
        target, source = self.parameters, gradient.vector
        await self._work(lambda: target.tensor.add_(source.tensor, alpha=-rate), [source], [target])

    async def accumulate(self, gradient: base.Gradient) -> None:
        """See `strategies.base.Worker`."""
        if not gradient.samples:
            self._count(gradient)
            return
        if self._taken.num_gradients == 0:
            await self._open_period(gradient.vector)
            self._gradient, self._accumulated = self._sum(), gradient.vector
        else:
            target, source = self._taken.vector, gradient.vector
            assert target is not None and target is not source
            await self._work(lambda: target.tensor.add_(source.tensor), [source], [target])
        self._count(gradient)

    async def descend(
        self, gradient: base.Gradient, lr: float | None = None, *, momentum: float = 0.0
    ) -> None:
        """See `strategies.base.Worker`."""
        num_before = self._taken.num_gradients
        if not gradient.samples:
            self._count(gradient)
            return
        if momentum == 0.0 and num_before == 0:
            await self.accumulate(gradient)  # which copies nothing
            await self.apply(gradient, lr)
            return
        velocity = self._velocity_of(momentum)
        if num_before == 0:
            await self._open_period(velocity)  # the sum over one step is the velocity itself
            total = None
        else:
            total = self._taken.vector = self._sum()
        step = LocalStep(self._local_rate(gradient, lr), momentum, second=num_before == 1)
        parameters = self.parameters
        await self._work(
            lambda: step(
                gradient.vector.tensor,
                parameters.tensor,
                None if total is None else total.tensor,
                None if velocity is None else velocity.tensor,
            ),
            [gradient.vector],
            [vector for vector in (parameters, total, velocity) if vector is not None],
        )
        self._count(gradient)

    def _local_rate(self, gradient: base.Gradient, lr: float | None) -> float:
        """The minibatch's own rate; or `lr`, scaled as the schedule scales its own."""
        assert isinstance(gradient, ComputedGradient)
        return gradient.lr if lr is None else lr * (gradient.lr / nominal_rate(self._lr))

    async def _work(
        self, arithmetic: Callable[[], object], reads: Sequence[Vector], writes: Sequence[Vector]
    ) -> None:
        """Arithmetic over whole vectors that this worker's next verb waits for."""
        begun_ns = self._runtime.now()
        await self._runtime.compute(
            lambda _: arithmetic(),
            work=Work("copy", elems=len(writes[0])),
            reads=[vector.all for vector in reads],
            writes=[vector.all for vector in writes],
        )
        self._stopwatch.worked(begun_ns, self._runtime.now())

    async def _open_period(self, vector: Vector | None) -> None:
        """Begins the next update, with what `vector` will hold, once the last push has let go of its own."""
        await self.server.settle()
        self._taken = Update(vector, 0, 0.0, self._basis, num_gradients=0)

    def _sum(self) -> Vector:
        if self._accumulated is None:
            self._accumulated = self._allocate("accumulated")
        return self._accumulated

    def _velocity_of(self, momentum: float) -> Vector | None:
        if momentum == 0.0:
            return None
        if self._velocity is None:
            self._velocity = self._allocate("velocity")
            self._velocity.tensor.zero_()
        return self._velocity

    def _count(self, gradient: base.Gradient) -> None:
        assert isinstance(gradient, ComputedGradient)
        self._taken.samples += gradient.samples
        self._taken.num_gradients += bool(gradient.samples)
        self._taken.learning_rate = gradient.lr
        self._refs.extend(gradient.refs)

    def take_accumulated(self) -> Update:
        """See `strategies.base.Worker`."""
        update, self._taken = self._taken, Update(None, 0, 0.0, self._basis, num_gradients=0)
        refs, self._refs = tuple(self._refs), []
        update.on_done = self._handed_out(refs)
        return update

    def update(self, gradient: base.Gradient) -> Update:
        """See `strategies.base.Worker`."""
        assert isinstance(gradient, ComputedGradient)
        return Update(
            gradient.vector if gradient.samples else None,
            gradient.samples,
            gradient.lr,
            self._basis,
            round=self.version,
            ready=gradient.ready if gradient.samples else None,
            on_done=self._handed_out(gradient.refs),
        )
