"""The minibatches of a worker, their order, and the end of the run for the worker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradstream.coordinator.client.requests import Assigned
from gradstream.data.base import BatchPlan, BatchRef
from gradstream.data.plan import EpochPlan, JoinedPlan, RoundPlan, parts_of, unjoined
from gradstream.data.shares import MANY, WorkerSpeed, begins_window, window_end
from gradstream.optim.schedules import Position, Rate, rate_at
from gradstream.runtime.base import Runtime, awaited_later
from gradstream.telemetry.events import StepEvent
from gradstream.worker.batch_gate import Gate
from gradstream.worker.computed import SampleBatch

# ---- batch queue -------------------------------------------------------------------------
# The minibatches that the coordinator has assigned to a worker, which asks for more before it runs out.
#
#     queue  ■ ■ ■ ■ ■ ■ ■ ■     a block; with half of it left, the worker asks for the next one, and continues
#     empty                      takes the next block, which has usually come already
#
# A worker computes its first minibatch before it asks for a second one, and then reports the time. Before that, its
# speed is unknown: at the end of a short run, all might have to wait for its second minibatch.
#
# If the coordinator has no minibatch at the moment, the worker flushes everything into the model, and asks again. The
# second answer comes when there is a minibatch, or when the run has no more.


class BatchSource(Protocol):
    """Assigns minibatches: the coordinator, through `WorkerRequests`."""

    async def assign(self, wait: bool, in_hand: int, measured: WorkerSpeed) -> Assigned:
        """See `WorkerRequests.assign`."""
        ...


class BatchQueue:
    """The minibatches assigned to one worker.

    Args:
        source: assigns more.
        runtime: runtime of the worker's node.
    """

    def __init__(self, source: BatchSource, runtime: Runtime) -> None:
        self._source = source
        self._runtime = runtime
        self._refs: deque[BatchRef] = deque()
        self._low = 0  # number of minibatches left at which the worker asks for the next block
        self._asked: asyncio.Task[Assigned] | None = None
        self._units = 1  # of samples in the current minibatch
        self._steps = 0
        self._measured = WorkerSpeed()

    def took(self, step: StepEvent) -> None:
        """Notes the time of a step. The first time is reported separately: see `BatchAssignment.took`."""
        self._steps += 1
        me = f"worker-{step.rank}"
        others = (who for who in step.waited_for if who.startswith("worker-") and who != me)
        for_others_s = sum(step.waited_for[who] for who in others)
        self._measured.took(self._units, step.compute_s + step.wait_s - for_others_s)

    async def next(self, close: Callable[[], Awaitable[None]]) -> BatchRef | None:
        """The next minibatch; None if the run has no more.

        Args:
            close: flushes everything that was computed into the model.

        Raises:
            PeerLostError, DeadlineError: the coordinator was lost.
        """
        while not self._refs:
            if self._asked is None:
                self._ask(in_hand=0)
            asked, self._asked = self._asked, None
            assert asked is not None
            answer = self._take(await asked)
            if not self._refs:
                await close()
                if answer.complete:
                    return None
                answer = self._take(await self._source.assign(True, 0, self._since()))
                if answer.complete:
                    return None
        ref = self._refs.popleft()
        self._units = ref.count
        if self._steps and len(self._refs) <= self._low and self._asked is None:
            self._ask(in_hand=len(self._refs) + 1)
        return ref

    def _ask(self, in_hand: int) -> None:
        asking = self._source.assign(False, in_hand, self._since())
        self._asked = awaited_later(self._runtime.spawn(asking, name=f"{self._runtime.node}-assign"))

    def _since(self) -> WorkerSpeed:
        measured, self._measured = self._measured, WorkerSpeed()
        return measured

    def _take(self, answer: Assigned) -> Assigned:
        self._refs.extend(answer.refs)
        self._low = len(self._refs) // 2
        return answer


# ---- balance -----------------------------------------------------------------------------
# The worker's side of shares by measured speed: it reports the time of its gradients, and follows the decision.


class ShareSource(Protocol):
    """Decides the shares: the coordinator, through `WorkerRequests`."""

    async def shares(self, ref: BatchRef, measured: WorkerSpeed) -> Sequence[int]:
        """Number of samples of each worker in a round, from the round of `ref` on."""
        ...


class ShareReporter:
    """Keeps a worker's plan in step with the shares that all workers follow.

    Args:
        plan: this worker's own plan.
        source: asked for the shares before each rebalance window but the first.
    """

    def __init__(self, plan: RoundPlan | JoinedPlan, source: ShareSource) -> None:
        self._plan = plan
        self._source = source
        self._late = False
        self._steps = 0
        self._measured = WorkerSpeed()

    def join_late(self) -> None:
        """Makes the plan follow the current shares, since the other workers have made rounds without this one."""
        self._late = True

    def took(self, samples: int, seconds: float) -> None:
        """Notes the time of a gradient.

        The first time is ignored because of one-time work, unless the gradient is of many minibatches.
        """
        self._steps += 1
        if self._steps > 1 or (isinstance(self._plan, JoinedPlan) and self._plan.k >= MANY):
            self._measured.took(samples, seconds)

    async def reach(self, ref: BatchRef) -> None:
        """Makes sure that the plan knows the samples of this minibatch, the worker's next one.

        Raises:
            PeerLostError, DeadlineError: the coordinator was lost.
        """
        late, self._late = self._late, False
        if not begins_window(ref.batch) and not late:
            return
        sizes: Sequence[int] = self._plan.sizes(ref.epoch, ref.batch)
        if self._steps or late:
            sizes = await self._source.shares(ref, self._measured)
            self._measured = WorkerSpeed()
        self._plan.reassign(ref.epoch, ref.batch, sizes, until=window_end(ref.batch))


# ---- schedule ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScheduleHooks:
    """The replica's actions between minibatches, called by the schedule.

    Args:
        gate: awaited before each minibatch: see `BatchGate.gate`.
        close: awaited when the worker has no minibatch left, before it waits for the end of the run. It flushes
            everything that was computed into the model; otherwise two workers could wait for each other.
        skip: skips minibatches of rounds that went on without this worker; returns their number.
        done: number of the worker's own minibatches that it has completed before.
    """

    gate: Callable[[], Awaitable[Gate]]
    close: Callable[[], Awaitable[None]]
    skip: Callable[[], int]
    done: int = 0


class BatchSchedule(Protocol):
    """The minibatches of a worker: those of the job's data (`Schedule`), or those of a user's loop (`LoopSource`)."""

    def refs(self, hooks: ScheduleHooks) -> AsyncGenerator[BatchRef, None]:
        """The worker's minibatches, in order, until the run is over."""
        ...

    def size(self, ref: BatchRef) -> int | None:
        """Number of samples; `UNKNOWN` until the gradient is computed; None if unknown until they are read."""
        ...

    def rate(self, ref: BatchRef) -> float:
        """Learning rate of a minibatch. In a user's loop it becomes known with the gradient."""
        ...

    def round_of(self, ref: BatchRef) -> Sequence[tuple[int, float]] | None:
        """(samples, learning rate) of all workers in the round of a minibatch; None if unknown."""
        ...

    def place(self, ref: BatchRef) -> int:
        """Position of a minibatch's first sample in the order of its data epoch, the same in a resumed run."""
        ...

    def missed(self, done: int, version: int) -> Sequence[BatchRef]:
        """The worker's own minibatches of rounds that went on without it.

        Args:
            done: number of its minibatches that it has completed or skipped.
            version: version of its parameters.
        """
        ...

    @property
    def takes_part(self) -> bool:
        """Whether the present round counts as one of this worker's; not where its loop lets rounds pass."""
        ...

    def heard(self, counts: Sequence[int]) -> None:
        """Hears how many samples each worker brings to the present round, where `round_of` does not know."""
        ...

    def passed(self, batch: SampleBatch) -> bool:
        """Notes that the worker has completed a minibatch. Returns whether that was a step to report."""
        ...

    def progress(self, samples: int, steps: int) -> tuple[int, int]:
        """Samples and steps that count as done, given the worker's own counts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The minibatches of a worker in the job's data.

    Args:
        plan: division of the data into minibatches.
        rank: rank of the worker.
        epochs: number of data epochs, or None.
        steps: number of minibatches of each worker from here on, or None; with both, the smaller one counts.
        lr: learning rate, or a schedule of it.
        queue: minibatches that the coordinator assigns to this worker. None if the worker has a partition of its
            own: it takes part in rounds, or is alone.
        num_steps: number of minibatches of the whole run, if `steps` counts those of a resumed run.
        balance: measures the workers' speed, if that decides the shares of a round.
        first_version: version of the parameters that the first minibatch is for, if rounds may continue without
            this worker: it then skips their minibatches. None if it computes all of them.
    """

    plan: BatchPlan
    rank: int
    epochs: int | None
    steps: int | None
    lr: Rate
    queue: BatchQueue | None = None
    num_steps: int | None = None
    balance: ShareReporter | None = None
    first_version: int | None = None

    @property
    def num_batches(self) -> int:
        """Number of minibatches of this worker's own partition."""
        return self._count(self.rank)

    def _count(self, rank: int) -> int:
        limits = [] if self.epochs is None else [self.plan.batches_before(rank, self.epochs)]
        if self.steps is not None:
            limits.append(self.steps * self.plan.per_step if self.plan.batches_per_epoch(rank) else 0)
        return min(limits)

    def goes_on_after(self, number: int) -> bool:
        """Whether this worker has samples after its minibatch of this number, from 0."""
        later = (self.plan.nth(self.rank, one) for one in range(number + 1, self.num_batches))
        return any(self.plan.size(ref) != 0 for ref in later)

    def at_end(self, batch: SampleBatch, most: int) -> tuple[int, int]:
        """The last parts of a minibatch, at most `most`: their number, and the number of their samples."""
        if batch.samples is not None:
            sizes = [part.num_samples for part in batch.samples[-most:]]
        else:
            plan = unjoined(self.plan)
            sizes = [plan.likely_size(part) for part in parts_of(self.plan, batch.ref)[-most:]]
        return len(sizes), sum(sizes)

    def position(self, ref: BatchRef) -> Position:
        """The place of a minibatch in the run, in steps of each worker, whichever worker computes it.

        In an epoch that had begun before the run was resumed, places are counted from the epoch's end.
        """
        plan, partition = self.plan, ref.partition
        total = plan.batches_per_epoch(partition)
        per_epoch = -(-total // plan.per_step)
        batch = (total - plan.batches_in(partition, ref.epoch) + ref.batch) // plan.per_step
        limits = [] if self.epochs is None else [self.epochs * per_epoch]
        if self.steps is not None:
            limits.append(self.num_steps or self.steps)
        return Position(ref.epoch * per_epoch + batch, min(limits), per_epoch)

    @property
    def first(self) -> Position:
        """The place where the run begins: 0, or where it is resumed."""
        lines = (line for line in range(self.plan.num_partitions) if self._count(line))
        return min((self.position(self.plan.nth(line, 0)) for line in lines), key=lambda one: one.step)

    @property
    def last(self) -> BatchRef:
        """The last minibatch of the longest partition: the run ends with its data epoch."""
        line = max(range(self.plan.num_partitions), key=self._count)
        return self.plan.nth(line, self._count(line) - 1)

    async def refs(self, hooks: ScheduleHooks) -> AsyncGenerator[BatchRef, None]:
        """See `BatchSchedule`."""
        source = _Partition(self, hooks.skip, hooks.done) if self.queue is None else self.queue
        while (ref := await source.next(hooks.close)) is not None:
            if self.balance is not None:
                await self.balance.reach(ref)
            if await hooks.gate() == "over":
                return
            yield ref

    def size(self, ref: BatchRef) -> int | None:
        """See `BatchSchedule`."""
        return self.plan.size(ref)

    def ends_epoch(self, ref: BatchRef) -> bool:
        """Whether a minibatch is the last one of its partition in its data epoch."""
        return ref.stop == self.plan.batches_in(ref.partition, ref.epoch)

    def rate(self, ref: BatchRef) -> float:
        """See `BatchSchedule`."""
        return rate_at(self.lr, self.position(ref))

    def round_of(self, ref: BatchRef) -> Sequence[tuple[int, float]] | None:
        """See `BatchSchedule`."""
        found = []
        for rank in range(self.plan.num_workers):
            other = BatchRef(ref.epoch, rank, ref.batch)
            size = self.plan.size(other)
            if size is None:
                return None
            found.append((size, self.rate(other)))
        return found

    def place(self, ref: BatchRef) -> int:
        """See `BatchSchedule`."""
        plan = unjoined(self.plan)
        assert isinstance(plan, EpochPlan)
        return plan.runs(parts_of(self.plan, ref)[0])[0][0]

    def missed(self, done: int, version: int) -> Sequence[BatchRef]:
        """See `BatchSchedule`."""
        if self.first_version is None:
            return ()
        return [self.plan.nth(self.rank, number) for number in range(done, version - self.first_version)]

    takes_part = True
    """See `BatchSchedule`."""

    def heard(self, counts: Sequence[int]) -> None:
        """See `BatchSchedule`: not called, since the plan knows."""

    def passed(self, batch: SampleBatch) -> bool:
        """See `BatchSchedule`."""
        return True

    def progress(self, samples: int, steps: int) -> tuple[int, int]:
        """See `BatchSchedule`."""
        return samples, steps


class _Partition:
    """All minibatches of a worker's own partition, in order. See `BatchQueue`."""

    def __init__(self, schedule: Schedule, skip: Callable[[], int], done: int) -> None:
        self._schedule = schedule
        self._skip = skip
        self._next = done

    async def next(self, close: Callable[[], Awaitable[None]]) -> BatchRef | None:
        """The next one; None if there is none."""
        number = self._next = self._next + self._skip()
        if number >= self._schedule.num_batches:
            await close()
            return None
        self._next += 1
        return self._schedule.plan.nth(self._schedule.rank, number)
