"""Which minibatches a worker goes through, in which order, and when the run is over for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from gradstream.data.base import BatchRef, Plan
from gradstream.optim.schedules import Position

__all__ = ["OrphanSource", "Schedule"]

Flush = Callable[[], Awaitable[None]]


class OrphanSource(Protocol):
    """Whoever knows of minibatches that lost workers have left: the coordinator, through `Member`."""

    async def orphans(self, epoch: int, last: bool) -> tuple[list[BatchRef], bool]:
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
        steps: minibatches to go through, or None; with both, the smaller counts.
        orphanage: asked for minibatches of lost workers; None for a worker that is alone.
    """

    plan: Plan
    cut: Literal["rounds", "partitions"]
    rank: int
    epochs: int | None
    steps: int | None
    orphanage: OrphanSource | None

    @property
    def num_batches(self) -> int:
        """How many minibatches are this worker's own."""
        return self._count(self.rank)

    def _count(self, rank: int) -> int:
        per_epoch = self.plan.batches_per_epoch(rank)
        limits = [] if self.epochs is None else [self.epochs * per_epoch]
        if self.steps is not None:
            limits.append(self.steps if per_epoch else 0)
        return min(limits)

    def position(self, ref: BatchRef) -> Position:
        """Where a minibatch lies in the run of its partition, whoever computes it."""
        per_epoch = self.plan.batches_per_epoch(ref.partition)
        return Position(ref.epoch * per_epoch + ref.batch, self._count(ref.partition), per_epoch)

    @property
    def last(self) -> BatchRef:
        """The last minibatch of the longest partition: the run ends with its data epoch."""
        rank = max(range(self.plan.num_partitions), key=self._count)
        epoch, batch = divmod(self._count(rank) - 1, self.plan.batches_per_epoch(rank))
        return BatchRef(epoch, rank, batch)

    @property
    def last_epoch(self) -> int:
        """The data epoch in which the longest partition ends."""
        ends = []
        for rank in range(self.plan.num_partitions):
            per_epoch = self.plan.batches_per_epoch(rank)
            ends.append(-(-self._count(rank) // per_epoch) - 1 if per_epoch else 0)
        return max(0, *ends)

    async def refs(self, flush: Flush) -> AsyncIterator[BatchRef]:
        """Own minibatches in order; after each epoch, those of workers that died.

        Args:
            flush: awaited before the end of the run is waited for: what this worker has
                computed must be in the model by then, or two workers would wait for each other.
        """
        per_epoch = self.plan.batches_per_epoch(self.rank)
        for count in range(self.num_batches):
            epoch, batch = divmod(count, per_epoch)
            if batch == 0 and epoch > 0:
                async for ref in self._orphans(epoch - 1):
                    yield ref
            yield BatchRef(epoch, self.rank, batch)
        await flush()
        complete = self.orphanage is None or self.cut == "rounds"
        while not complete:
            assert self.orphanage is not None
            refs, complete = await self.orphanage.orphans(self.last_epoch, True)
            for ref in refs:
                yield ref
            await flush()

    async def _orphans(self, epoch: int) -> AsyncIterator[BatchRef]:
        """Minibatches up to `epoch` that are free to be taken now."""
        refs: list[BatchRef] = []
        while self.orphanage is not None and self.cut == "partitions":
            refs, _ = await self.orphanage.orphans(epoch, False)
            if not refs:
                return
            for ref in refs:
                yield ref
