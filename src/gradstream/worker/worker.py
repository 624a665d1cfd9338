"""The worker: one model replica's memory, compute and verbs, as a strategy sees them.

Four vectors: parameters, spare (where the next fetch lands), gradient, accumulated; or, with momentum
and fetches that nobody computes beside, velocity instead of the spare one. They change roles instead
of being copied: adopting a fetch swaps parameters and spare, refreshing swaps parameters and
gradient, accumulating the first gradient of a period swaps the last two.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from gradstream.data.base import BatchRef, Feed
from gradstream.errors import GradientError, GradstreamError, UserCodeError
from gradstream.events import StepEvent
from gradstream.memory import Vector
from gradstream.model.base import Model
from gradstream.model.batch import Batch
from gradstream.model.check import finite
from gradstream.runtime.base import Progress, Report, Runtime, Work, awaited_later
from gradstream.server.client import Arrival, ServerClient, Update
from gradstream.strategies import base
from gradstream.worker.schedule import Schedule
from gradstream.worker.stopwatch import Stopwatch

__all__ = ["ComputedGradient", "LocalStep", "Replica", "SampleBatch"]

BLOCK_ELEMS = 1 << 17  # of four float32 vectors: 2 MiB


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """A minibatch by name and size; its samples are read where the gradient is computed.

    Those of a stream have been read already: only so is their number known.
    """

    ref: BatchRef
    num_samples: int
    samples: Batch | None = None


@dataclass(slots=True)
class ComputedGradient:
    """A gradient that is being computed into `vector`, or has been."""

    vector: Vector
    samples: int
    refs: tuple[BatchRef, ...]
    ready: Progress = field(default_factory=Progress)
    task: asyncio.Task[float] | None = None

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
        model: this replica's model.
        feed: reads the samples of minibatches.
        schedule: which minibatches are this worker's.
        server: client of the parameter server, with a spare vector.
        rank: of this worker.
        num_workers: W.
        lr: learning rate, sent with each push.
        seed: of the run.
        on_receipt: told which minibatches are in the model, once their push is acknowledged.
        on_step: told of each step.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: Model,
        feed: Feed,
        schedule: Schedule,
        server: ServerClient,
        *,
        rank: int,
        num_workers: int,
        lr: float,
        seed: int,
        on_receipt: Callable[[Sequence[BatchRef]], None],
        on_step: Callable[[StepEvent], None],
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self.step = 0
        self.version = -1  # nothing adopted yet
        self.server = server
        self._runtime = runtime
        self._model = model
        self._feed = feed
        self._schedule = schedule
        self._lr = lr
        self._seed = seed
        self._on_receipt = on_receipt
        self._on_step = on_step
        self._basis: Sequence[int] = [0] * server.chunks.num_chunks
        self.parameters = self._allocate("parameters")
        self._gradient = self._allocate("gradient")
        self._accumulated: Vector | None = None  # allocated by the first strategy that accumulates
        self._velocity: Vector | None = None  # allocated by the first local step with momentum
        self._taken = Update(None, 0, lr, self._basis, num_gradients=0)
        self._refs: list[BatchRef] = []
        self._stopwatch = Stopwatch(runtime.node, server.claims, runtime.now())
        self._loss = math.nan

    def _allocate(self, name: str) -> Vector:
        layout = self._model.layout
        return self._runtime.memory.allocate(layout.elems, layout.dtype, name)

    def retire(self) -> None:
        """Gives back all memory but the parameters. No verb can be used any more."""
        nothing = Vector("nothing", torch.empty(0))
        self._gradient, self._accumulated, self._velocity, self.server.spare = nothing, None, None, None
        self._taken.vector = None

    # ---- batches ------------------------------------------------------------------------

    async def batches(self) -> AsyncIterator[base.Minibatch]:
        """See `strategies.base.Worker`."""
        async for ref in self._schedule.refs(self._flush):
            self._stopwatch.begin(self._runtime.now())
            batch = await self._named(ref)
            yield batch
            self._report(batch)
            self.step += 1

    async def _named(self, ref: BatchRef) -> SampleBatch:
        plan = self._schedule.plan
        size = plan.size(ref)
        if size is not None:
            return SampleBatch(ref, size)
        likely = plan.likely_size(ref)
        samples = await self._runtime.compute(
            lambda _: self._read(ref),
            work=Work("read", samples=likely),
            phantom=Batch(None, None, likely, np.empty(0, np.int64)),
        )
        return SampleBatch(ref, samples.num_samples, samples)

    async def _flush(self) -> None:
        """Everything this worker has computed is in the model, and receipts are on their way."""
        if self._taken.num_gradients:
            await self.server.push_soon(self.take_accumulated())
        await self.server.settle()

    def _report(self, batch: SampleBatch) -> None:
        event = StepEvent(
            rank=self.rank,
            step=self.step,
            epoch=batch.ref.epoch,
            samples=batch.num_samples,
            loss=self._loss,
            **self._stopwatch.times(self._runtime.now()),
        )
        self._on_step(event)

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
        gradient = ComputedGradient(self._gradient, batch.num_samples, (batch.ref,))
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
    ) -> float:
        try:
            if free is not None:
                await free
            begun_ns = self._runtime.now()
            self._loss = await self._runtime.compute(
                partial(self._arithmetic, batch, gradient.vector.tensor, mean),
                work=Work("gradient", samples=batch.num_samples, elems=len(gradient.vector)),
                reads=[self.parameters.all],
                writes=[gradient.vector.all],
                milestones=self._model.layout.milestones,
                on_progress=gradient.ready.advance,
                phantom=math.nan,
            )
        except BaseException as error:
            gradient.ready.fail(error)
            raise
        self._stopwatch.computed(begun_ns, self._runtime.now())
        return self._loss

    def _arithmetic(self, batch: SampleBatch, into: torch.Tensor, mean: bool, report: Report) -> float:
        """Reads the samples and differentiates: the user's code, on the arithmetic thread."""
        scaled = mean and self._model.reduction == "sum"
        seed = hash_seed(self._seed, self.rank, self.step)
        samples = batch.samples or self._read(batch.ref)
        hold: Report = (lambda _: None) if scaled else report
        with self._users_code(batch.ref, "model"):
            loss = self._model.gradient(self.parameters.tensor, samples, into, seed=seed, report=hold)
        if scaled:
            into.mul_(1 / batch.num_samples)
            report(len(into))
        if math.isinf(loss) or not finite(into):
            what = f"loss is {loss}" if math.isinf(loss) else "gradient has a NaN or an infinity"
            raise GradientError(
                f"{self._where(batch.ref)}: the {what}; lower the learning rate, scale the inputs, or "
                "clip the gradient. Nothing of it was applied where the exchange does not overlap"
            )
        return loss

    def _read(self, ref: BatchRef) -> Batch:
        """The samples of a minibatch: the user's code, on the arithmetic thread."""
        with self._users_code(ref, "data set"):
            return self._feed.read(ref)

    @contextmanager
    def _users_code(self, ref: BatchRef, whose: str) -> Iterator[None]:
        """What the user's code raises names the worker, step and minibatch, and keeps its traceback."""
        try:
            yield
        except GradstreamError as error:
            error.args = (f"{self._where(ref)}: {error}", *error.args[1:])
            raise
        except Exception as error:
            message = f"{self._where(ref)}: the {whose} raised {type(error).__name__}: {error}"
            raise UserCodeError(message, traceback.format_exc()) from error

    def _where(self, ref: BatchRef) -> str:
        return f"worker-{self.rank}, step {self.step} (data epoch {ref.epoch}, batch {ref.batch})"

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
        rate = self._lr if lr is None else lr
        target, source = self.parameters, gradient.vector
        await self._work(lambda: target.tensor.add_(source.tensor, alpha=-rate), [source], [target])

    async def accumulate(self, gradient: base.Gradient) -> None:
        """See `strategies.base.Worker`."""
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
        step = LocalStep(self._lr if lr is None else lr, momentum, second=num_before == 1)
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
        self._taken = Update(vector, 0, self._lr, self._basis, num_gradients=0)

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
        self._taken.num_gradients += 1
        self._refs.extend(gradient.refs)

    def take_accumulated(self) -> Update:
        """See `strategies.base.Worker`."""
        update, self._taken = self._taken, Update(None, 0, self._lr, self._basis, num_gradients=0)
        refs, self._refs = tuple(self._refs), []
        update.on_done = partial(self._on_receipt, refs)
        return update

    def update(self, gradient: base.Gradient) -> Update:
        """See `strategies.base.Worker`."""
        assert isinstance(gradient, ComputedGradient)
        return Update(
            gradient.vector if gradient.samples else None,
            gradient.samples,
            self._lr,
            self._basis,
            round=self.version,
            ready=gradient.ready if gradient.samples else None,
            on_done=partial(self._on_receipt, gradient.refs),
        )


def hash_seed(seed: int, rank: int, step: int) -> int:
    """A seed for one gradient's own randomness (dropout): a function of (seed, rank, step)."""
    value = (seed * 0x9E3779B97F4A7C15 + rank * 0xBF58476D1CE4E5B9 + step * 0x94D049BB133111EB) & (2**64 - 1)
    value ^= value >> 31
    return value & (2**63 - 1)
