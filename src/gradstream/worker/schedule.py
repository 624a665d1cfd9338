"""Which minibatches a worker goes through, in which order, and when the run is over for it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradstream.data.base import BatchPlan, BatchRef
from gradstream.data.reassignment import Block, Epoch
from gradstream.optim.schedules import Position
from gradstream.worker.balance import ShareReporter
from gradstream.worker.batch_gate import Gate
from gradstream.worker.batch_queue import BatchQueue

__all__ = ["UNKNOWN", "EndingSource", "OpenSchedule", "Schedule", "ScheduleHooks", "Supply"]

UNKNOWN = -1
"""Samples of a minibatch that nobody has seen yet."""


@dataclass(frozen=True, slots=True)
class ScheduleHooks:
    """What lies between a worker's minibatches.

    Args:
        gate: passed before each: see `BatchGate.gate`.
        turn: number of the turn by which the worker was let in, after "anew": what was handed to it before is
            not its any more.
        close: awaited before the end of the run is waited for: what this worker has computed must be in the
            model by then, or two workers would wait for each other.
        skip: how many of its own minibatches, from the next one on, are left out.
    """

    gate: Callable[[], Awaitable[Gate]]
    turn: Callable[[], int]
    close: Callable[[], Awaitable[None]]
    skip: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A worker's minibatches.

    Args:
        plan: how the data is cut.
        rank: of this worker.
        epochs: data epochs to go through, or None.
        steps: minibatches of each worker from here on, or None; with both, the smaller counts.
        queue: what the coordinator assigns to this worker. None where all of its own line are its: it takes
            part in rounds, or is alone.
        num_steps: minibatches of the whole run, where `steps` are those of a resumed one.
        balance: passed by each minibatch, where shares are measured.
    """

    plan: BatchPlan
    rank: int
    epochs: int | None
    steps: int | None
    queue: BatchQueue | None
    num_steps: int | None = None
    balance: ShareReporter | None = None

    @property
    def num_batches(self) -> int:
        """How many minibatches are this worker's own."""
        return self._count(self.rank)

    def _count(self, rank: int) -> int:
        limits = [] if self.epochs is None else [self.plan.batches_before(rank, self.epochs)]
        if self.steps is not None:
            limits.append(self.steps * self.plan.per_step if self.plan.batches_per_epoch(rank) else 0)
        return min(limits)

    def position(self, ref: BatchRef) -> Position:
        """Where a minibatch lies in the run, in steps of each worker, whoever computes it.

        In an epoch that a resumed run has found begun, it is counted from the epoch's end.
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
        """Where the run begins: at 0, or where it is resumed."""
        lines = (line for line in range(self.plan.num_partitions) if self._count(line))
        return min((self.position(self.plan.nth(line, 0)) for line in lines), key=lambda one: one.step)

    @property
    def last(self) -> BatchRef:
        """The last minibatch of the longest line: the run ends with its data epoch."""
        line = max(range(self.plan.num_partitions), key=self._count)
        return self.plan.nth(line, self._count(line) - 1)

    async def refs(self, hooks: ScheduleHooks) -> AsyncGenerator[BatchRef, None]:
        """The minibatches of this worker, in order.

        Assignments from before a pause may be another worker's by the time this one is resumed: they are dropped.
        """
        taken = _Line(self, hooks) if self.queue is None else self.queue
        while (ref := await taken.next(hooks.turn, hooks.close)) is not None:
            if self.balance is not None:
                await self.balance.reach(ref)
            match await hooks.gate():
                case "over":
                    return
                case "anew":
                    taken.put_back(ref, hooks.turn())
                case _:
                    yield ref


class _Line:
    """All minibatches of a worker's own line, in order. See `BatchQueue`."""

    def __init__(self, schedule: Schedule, hooks: ScheduleHooks) -> None:
        self._schedule = schedule
        self._skip = hooks.skip
        self._next = 0

    async def next(self, turn: Callable[[], int], close: Callable[[], Awaitable[None]]) -> BatchRef | None:
        """The next one; None where there is none."""
        del turn
        k = self._next = self._next + self._skip()
        if k >= self._schedule.num_batches:
            await close()
            return None
        self._next += 1
        return self._schedule.plan.nth(self._schedule.rank, k)

    def put_back(self, ref: BatchRef, turn: int) -> None:
        """It was not begun: it is still the next one."""
        del ref, turn
        self._next -= 1


class EndingSource(Protocol):
    """Knows when a run of unplanned length is over: the coordinator, through `WorkerRequests`."""

    async def ending(self, batches: int, samples: int, next_round: int) -> bool:
        """Whether the run is over for a worker that has run out; else it takes part in `next_round`."""
        ...

    def begun(self, epoch: Epoch, step: int, *, unclear: bool = False) -> None:
        """Hears of an epoch that a loop of the user's begins: see `Reassignment.begun`."""
        ...

    async def take_over(
        self, epoch: Epoch, begin: int, step: int, parts: Sequence[int], per_step: int, oldest: int
    ) -> Block | None:
        """Gives minibatches that lost workers have left: see `Reassignment.take`."""
        ...


class Supply(Protocol):
    """Minibatches that a worker brings itself, without knowing how many there will be."""

    @property
    def ended(self) -> bool:
        """Whether there are no more: the minibatch handed out last, if it had no samples, was none."""
        ...

    @property
    def batches(self) -> int:
        """How many there were so far."""
        ...

    @property
    def samples(self) -> int:
        """Of how many samples."""
        ...


class OpenSchedule:
    """A worker's minibatches in a run that ends when every worker has run out.

    A minibatch is handed out before anybody knows whether there is one: its size is `UNKNOWN`, and
    0 in the end where there was none. In rounds, minibatches of size 0 follow until the others have
    run out too (see `OpenLedger`).

    Args:
        supply: says when this worker has run out.
        rank: of this worker.
        endings: asked whether the run is over.
    """

    def __init__(self, supply: Supply, rank: int, endings: EndingSource) -> None:
        self.endings = endings
        self._supply = supply
        self._rank = rank

    @property
    def size(self) -> int:
        """How many samples the next minibatch has: 0 after this worker has run out, `UNKNOWN` before."""
        return 0 if self._supply.ended else UNKNOWN

    async def refs(self, hooks: ScheduleHooks) -> AsyncGenerator[BatchRef, None]:
        """Own minibatches, one at a time, then rounds without samples; see `Schedule.refs`."""
        supply, endings = self._supply, self.endings
        for number in itertools.count():
            if supply.ended:
                await hooks.close()
                if await endings.ending(supply.batches, supply.samples, number):
                    return
            if await hooks.gate() == "over":
                return
            yield BatchRef(0, self._rank, number)
