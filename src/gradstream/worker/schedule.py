"""Which minibatches a worker goes through, in which order, and when the run is over for it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from gradstream.data.base import BatchRef, Plan
from gradstream.membership.member import Left
from gradstream.optim.schedules import Position
from gradstream.wire import v1
from gradstream.worker.balance import Balance
from gradstream.worker.pace import Gate

__all__ = ["UNKNOWN", "EndingSource", "OpenSchedule", "OrphanSource", "Passage", "Schedule", "Supply"]

NOTHING = Left([], complete=True)

UNKNOWN = -1
"""Samples of a minibatch that nobody has seen yet."""


@dataclass(frozen=True, slots=True)
class Passage:
    """What lies between a worker's minibatches.

    Args:
        gate: passed before each: see `Pace.gate`.
        turn: by which the worker was let in, after "anew": where its own line goes on, and what was handed
            to it before is not its any more.
        close: awaited before the end of the run is waited for: what this worker has computed must be in the
            model by then, or two workers would wait for each other.
        skip: how many of its own minibatches, from the next one on, are left out.
    """

    gate: Callable[[], Awaitable[Gate]]
    turn: Callable[[], v1.Turn]
    close: Callable[[], Awaitable[None]]
    skip: Callable[[], int]


class OrphanSource(Protocol):
    """Whoever knows of minibatches that lost workers have left: the coordinator, through `Member`."""

    async def orphans(self, epoch: int, last: bool) -> Left:
        """Minibatches to go through, and whether every one up to `epoch` is accounted for."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """A worker's minibatches.

    Args:
        plan: how the data is cut.
        cut: rounds for all, or a partition for each. Only partitions can be taken over.
        rank: of this worker.
        epochs: data epochs to go through, or None.
        steps: minibatches to go through from here on, or None; with both, the smaller counts.
        orphanage: asked for minibatches of lost workers; None for a worker that is alone.
        num_steps: minibatches of the whole run, where `steps` are those of a resumed one.
        balance: passed by each minibatch, where shares are measured.
    """

    plan: Plan
    cut: Literal["rounds", "partitions"]
    rank: int
    epochs: int | None
    steps: int | None
    orphanage: OrphanSource | None
    num_steps: int | None = None
    balance: Balance | None = None

    @property
    def num_batches(self) -> int:
        """How many minibatches are this worker's own."""
        return self._count(self.rank)

    def _count(self, rank: int) -> int:
        limits = [] if self.epochs is None else [self.plan.batches_before(rank, self.epochs)]
        if self.steps is not None:
            limits.append(self.steps if self.plan.batches_per_epoch(rank) else 0)
        return min(limits)

    def position(self, ref: BatchRef) -> Position:
        """Where a minibatch lies in the run of its partition, whoever computes it.

        In an epoch that a resumed run has found begun, it is counted from the epoch's end.
        """
        plan, partition = self.plan, ref.partition
        per_epoch = plan.batches_per_epoch(partition)
        batch = per_epoch - plan.batches_in(partition, ref.epoch) + ref.batch
        limits = [] if self.epochs is None else [self.epochs * per_epoch]
        if self.steps is not None:
            limits.append(self.num_steps or self.steps)
        return Position(ref.epoch * per_epoch + batch, min(limits), per_epoch)

    @property
    def last(self) -> BatchRef:
        """The last minibatch of the longest partition: the run ends with its data epoch."""
        rank = max(range(self.plan.num_partitions), key=self._count)
        return self.plan.nth(rank, self._count(rank) - 1)

    @property
    def last_epoch(self) -> int:
        """The data epoch in which the longest partition ends."""
        counts = enumerate(map(self._count, range(self.plan.num_partitions)))
        return max((self.plan.nth(rank, count - 1).epoch for rank, count in counts if count), default=0)

    async def refs(self, passage: Passage) -> AsyncGenerator[BatchRef, None]:
        """Own minibatches in order; after each epoch, those that other workers have left.

        What was in hand when this worker was held back may be another's when it is let in: it is dropped.
        """
        count, begun = passage.skip(), self.plan.done.epochs
        left = NOTHING  # of others, in hand
        while True:
            own = self.plan.nth(self.rank, count) if count < self.num_batches else None
            if own is None and not left.refs:
                await passage.close()
                left = await self._left(self.last_epoch, last=True)
                if left.complete:
                    return
            elif own is not None and own.epoch > begun and not left.refs:
                left = await self._left(own.epoch - 1, last=False)
                begun = begun if left.refs else own.epoch
            ref = left.refs[0] if left.refs else own
            if ref is None:
                continue
            if ref is own and self.balance is not None:
                await self.balance.reach(ref)
            gate = await passage.gate()
            if gate == "over":
                return
            if gate == "anew":
                turn = passage.turn()
                count, left = turn.first, left if left.turn == turn.number else NOTHING
                continue
            yield ref
            if ref is own:
                count += 1 + passage.skip()
            else:
                left = left._replace(refs=left.refs[1:])

    async def _left(self, epoch: int, *, last: bool) -> Left:
        """Some of what others have left of epochs 0 … `epoch`; if `last`, waits for such, or for the end."""
        if self.orphanage is None or self.cut == "rounds":
            return NOTHING
        return await self.orphanage.orphans(epoch, last)


class EndingSource(Protocol):
    """Whoever knows when a run whose length nobody has planned is over: the coordinator, through `Member`."""

    async def ending(self, batches: int, samples: int, next_round: int) -> bool:
        """Whether the run is over for a worker that has run out; else it takes part in `next_round`."""
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
        self._supply = supply
        self._rank = rank
        self._endings = endings

    @property
    def size(self) -> int:
        """How many samples the next minibatch has: 0 after this worker has run out, `UNKNOWN` before."""
        return 0 if self._supply.ended else UNKNOWN

    async def refs(self, passage: Passage) -> AsyncGenerator[BatchRef, None]:
        """Own minibatches, one at a time, then rounds without samples; see `Schedule.refs`."""
        supply, endings = self._supply, self._endings
        for number in itertools.count():
            if supply.ended:
                await passage.close()
                if await endings.ending(supply.batches, supply.samples, number):
                    return
            if await passage.gate() == "over":
                return
            yield BatchRef(0, self._rank, number)
