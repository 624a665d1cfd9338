"""The worker: one model replica's batches and compute, as a strategy sees them.

What is the same however gradients are brought together is here; the verbs of the parameter server are in
`server_replica.py`, those of a group of workers without one in `group_replica.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from gradstream.data.base import BatchRef
from gradstream.errors import ConfigError, UserCodeError
from gradstream.memory import Vector
from gradstream.model.base import Layout, Reduction
from gradstream.model.batch import Batch
from gradstream.model.factors import FactorPairs
from gradstream.model.rows import RowGradient
from gradstream.optim.schedules import Rate, rate_at
from gradstream.runtime.base import Runtime, Work, awaited_later
from gradstream.strategies import api
from gradstream.telemetry.events import StepEvent
from gradstream.telemetry.stopwatch import Stopwatch
from gradstream.telemetry.wait_attribution import WaitAttribution
from gradstream.worker.batch_gate import BatchGate, Gate
from gradstream.worker.computed import ComputedGradient, SampleBatch
from gradstream.worker.gradient import GradientSource, Result
from gradstream.worker.observer import Observer
from gradstream.worker.replica.updater import Factors, UpdateRule
from gradstream.worker.schedule import OpenSchedule, Schedule, ScheduleHooks

__all__ = ["Replica", "ReplicaContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaContext:
    """What every replica is made of.

    Args:
        runtime: of this node.
        layout: of the model's flat vector.
        reduction: whether gradients are means or sums over samples.
        differentiator: computes gradients; None where a loop of the user's does, which `loop` sees to.
        schedule: which minibatches are this worker's.
        rank: of this worker.
        num_workers: W.
        lr: learning rate, or a schedule of it; the rate goes with each gradient.
        joins: whether minibatches have several parts, whose gradients are summed up in one more vector.
        batch_gate: lets it begin each minibatch.
        first_step: number of its first minibatch; not 0 where the run is resumed.
        on_receipt: told which minibatches are in the model.
        on_step: told of each step.
        on_boundary: awaited between a minibatch and the next one, with this replica and what its parameters
            have gone through since: this minibatch, and those of rounds that it has missed. They stand still,
            as the strategy has left them.
        first_version: of the parameters that its first minibatch is for, where rounds may go on without it:
            it then skips their minibatches. None where it computes all of its own.
        watch: told of each gradient and of each update.
        update_rule: of parameters of its own, where the shards do not have it.
        decays: λ of the weight decay that is part of each gradient; () where it is not.
        scales: factors of the rate of local steps.
    """

    runtime: Runtime
    layout: Layout
    reduction: Reduction
    differentiator: GradientSource | None
    schedule: Schedule | OpenSchedule
    rank: int
    num_workers: int
    lr: Rate
    joins: bool
    batch_gate: BatchGate
    first_step: int = 0
    on_receipt: Callable[[Sequence[BatchRef]], None]
    on_step: Callable[[StepEvent], None]
    on_boundary: Callable[[Replica, Sequence[BatchRef]], Awaitable[None]]
    first_version: int | None = None
    watch: Observer = field(default_factory=Observer)
    update_rule: UpdateRule | None = None
    decays: Factors = ()
    scales: Factors = ()


class Replica(ABC):
    """Implements what `strategies.api.Worker` has besides the verbs of exchange.

    Args:
        context: see `ReplicaContext`.
        allocate: where vectors come from: (elems, dtype, name, lead_bytes=).
        parameters: its parameters; None allocates them.
        attribution: where the exchange notes for whom this worker had to wait.
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
        self.reduction = context.reduction
        self.step = context.first_step
        self.since = 0
        self.samples = 0  # gone through
        self.version = -1  # no parameters yet
        self.clock = 0
        self._runtime = context.runtime
        self._layout = context.layout
        assert context.differentiator is not None
        self._differentiator = context.differentiator
        self._schedule = context.schedule
        self._batch_gate = context.batch_gate
        self._lr = context.lr
        self._on_receipt = context.on_receipt
        self._on_step = context.on_step
        self._on_boundary = context.on_boundary
        self._first_version = context.first_version
        self._watch = context.watch
        self._num_rounds = 0  # of its own line of minibatches, gone through or missed
        self._num_turns = 0  # that `since` counts from
        self._late = False
        self._read_s = 0.0  # reading samples before a gradient
        self._between = True  # two minibatches
        self._bounded = False  # this worker takes part in clocks
        self._waited_for = False  # updates wait for this worker
        self.resumed = False
        self._allocate_elems = allocate
        self.parameters = self._allocate("parameters") if parameters is None else parameters
        self._gradient = self._allocate("gradient", self._landing)
        self._sums = self._allocate("sums", self._landing) if context.joins else None
        self._unpushed_refs: dict[BatchRef, None] = {}  # begun, and in no update yet
        self._bring_in: Callable[[], Awaitable[None]] = self._flush
        self._stopwatch = Stopwatch(context.runtime.node, attribution, context.runtime.now())
        self._result = Result(math.nan)

    @property
    def _landing(self) -> Layout:
        """Of the vectors that gradients are written into."""
        return self._layout

    def _new_rows(self) -> RowGradient | None:
        """Takes what the next gradient has of row-sparse tensors; None where that goes with the others."""
        return None

    def _allocate(self, name: str, layout: Layout | None = None) -> Vector:
        layout = layout or self._layout
        return self._allocate_elems(layout.elems, layout.dtype, name, lead_bytes=layout.lead_bytes)

    @property
    def progress(self) -> tuple[int, int]:
        """Samples and minibatches behind it, those before the run was resumed included."""
        return self.samples, self.step

    def retire(self) -> None:
        """Gives back all memory but the parameters. No verb can be used any more."""
        self._gradient, self._sums = Vector("nothing", torch.empty(0)), None

    @abstractmethod
    async def newest(self) -> torch.Tensor:
        """The model that the workers have in common at this moment, (E,): not for writing."""

    @abstractmethod
    async def _flush(self) -> None:
        """Returns once everything that this worker has computed is in the model."""

    async def _pause(self) -> None:
        """From now on no other worker waits for this one, which has nothing to do."""
        return

    async def _resume(self) -> bool:
        """Others wait for this worker again; returns whether it was paused."""
        return False

    def _memory_free(self, *, mean: bool) -> Coroutine[Any, Any, None] | None:
        """What the next gradient has to wait for before its vector may be written; None for nothing."""
        del mean
        return None

    def _factors(self, batch: SampleBatch, *, mean: bool) -> FactorPairs | None:
        """Memory for the sufficient factors of some layers in the next gradient; None for no layer."""
        del batch, mean
        return None

    # ---- batches ------------------------------------------------------------------------

    async def batches(
        self,
        flush: Callable[[], Awaitable[None]] | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
        waited_for: bool = False,
    ) -> AsyncIterator[api.Minibatch]:
        """See `strategies.api.ServerWorker`."""
        self._bring_in = flush or self._flush
        self._bounded, self._waited_for = before is not None, waited_for
        if self._bounded and self._batch_gate.driven:
            raise ConfigError(
                "the strategy waits for the clocks of all workers, and its drive() holds some of them back: "
                "they would be waited for for ever; use one of the two"
            )
        hooks = ScheduleHooks(
            gate=lambda: self._gate(before),
            turn=lambda: self._batch_gate.turn.number,
            close=self._close,
            skip=self._skip,
        )
        async with aclosing(self._schedule.refs(hooks)) as refs:
            async for ref in refs:
                self._between = False
                batch = await self._named(ref)
                self._unpushed_refs[ref] = None
                self.resumed = waited_for and await self._resume()
                yield batch
                self._between = True
                self._report(batch)
                self.step += 1
                self.since += 1
                self.samples += batch.num_samples
                self._num_rounds += 1
                await self._on_boundary(self, [ref, *self._missed()])

    async def _gate(self, before: Callable[[], Awaitable[None]] | None) -> Gate:
        """See `BatchGate.gate`. The step begins here: with the waiting for clocks, where there are any."""
        begun_ns = self._runtime.now()
        if before is not None:
            await self._resume()
            await before()
        gate = await self._batch_gate.gate(self._stand)
        if gate == "over" and self._bounded:
            await self._pause()
        if gate == "go":
            self._take_turn()
            self._stopwatch.begin(self._runtime.now() if before is None else begun_ns)
        return gate

    def _take_turn(self) -> None:
        """Begins to count anew where this worker was let in, or has come to another phase."""
        if self._num_turns != self._batch_gate.turns:
            self._num_turns, self.since = self._batch_gate.turns, 0

    @property
    def phase(self) -> str:
        """See `strategies.api.Worker`."""
        return self._batch_gate.phase

    def _missed(self) -> list[BatchRef]:
        """Own minibatches of rounds that have gone on without this worker."""
        if self._first_version is None or not isinstance(self._schedule, Schedule):
            return []
        last = self.version - self._first_version
        return [self._schedule.plan.nth(self.rank, number) for number in range(self._num_rounds, last)]

    def _skip(self) -> int:
        """Leaves them out; returns how many they are."""
        missed = len(self._missed())
        self._num_rounds += missed
        self.step += missed
        self._batch_gate.skip(missed)
        return missed

    async def _named(self, ref: BatchRef) -> SampleBatch:
        assert isinstance(self._schedule, Schedule)
        plan = self._schedule.plan
        size = plan.size(ref)
        if size is not None:
            return SampleBatch(ref, size)
        likely, begun_ns = plan.likely_size(ref), self._runtime.now()
        unread: tuple[Batch, ...] = (Batch(None, None, likely, np.empty(0, np.int64)),)
        samples = await self._runtime.compute(
            lambda _: self._differentiator.read(ref, self.step),
            work=Work("read", samples=likely),
            shape_only=unread,
        )
        self._read_s = (self._runtime.now() - begun_ns) / 1e9
        return SampleBatch(ref, sum(part.num_samples for part in samples), samples)

    async def _stand(self) -> None:
        await self._bring_in()
        if self._waited_for:
            await self._pause()
        self._batch_gate.stand()

    async def _close(self) -> None:
        """Everything is in the model, and no minibatch is missing in it: the end of the run is waited for."""
        await self._stand()
        if self._unpushed_refs:  # nobody else goes through them: all would wait for ever
            raise UserCodeError(
                f"worker-{self.rank}: {len(self._unpushed_refs)} of its {self.step} minibatches were never pushed, "
                f"{next(iter(self._unpushed_refs))} for one: a strategy must push the gradient of each minibatch, "
                "by update(), accumulate() or optimize()"
            )
        if self._bounded:
            await self._pause()

    def _handed_out(self, refs: Sequence[BatchRef]) -> Callable[[], None]:
        """These are in an update. What to call when it has been acknowledged."""
        for ref in refs:
            self._unpushed_refs.pop(ref, None)
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
            late=self._late,
            read_s=self._read_s + (self._result.read_s if batch.num_samples else 0.0),
            **self._stopwatch.times(self._runtime.now()),
        )
        self._late, self._read_s = False, 0.0
        self._on_step(event)

    def _rate(self, ref: BatchRef) -> float:
        assert isinstance(self._schedule, Schedule)
        return rate_at(self._lr, self._schedule.position(ref))

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
        rate = self._rate(batch.ref)
        gradient = ComputedGradient(self._gradient, batch, (batch.ref,), rate)
        gradient.factors, gradient.rows = self._factors(batch, mean=mean), self._new_rows()
        if batch.num_samples:
            work = self._compute(batch, gradient, self._memory_free(mean=mean), mean=mean)
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
                    factors=gradient.factors,
                    rows=gradient.rows,
                ),
                work=Work(
                    "gradient",
                    samples=batch.num_samples,
                    elems=len(gradient.vector),
                    elsewhere=self._differentiator.elsewhere,
                ),
                reads=[self.parameters.all],
                writes=[gradient.vector.all],
                milestones=self._differentiator.milestones(mean=mean, rows=gradient.rows is not None),
                on_progress=gradient.ready.advance,
                shape_only=Result(math.nan),
            )
        except BaseException as error:
            gradient.ready.fail(error)
            raise
        self._stopwatch.computed(begun_ns, self._runtime.now())
        self._watch.computed(self.rank, batch.ref, self.step, self._result.loss)
        return self._result
