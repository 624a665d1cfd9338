"""Joined minibatches: a step computes k minibatches one after the other (gradient accumulation).

A joined minibatch has a name, a size and a receipt like any other, so code that counts steps, rounds or receipts treats
it alike. Its parts are k successive minibatches of the underlying plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradstream.data.base import BatchPlan, BatchRef
from gradstream.data.batch_sequence import BatchSequence
from gradstream.data.plan import EpochPlan, RoundPlan
from gradstream.data.progress import DataProgress


class JoinedPlan(BatchSequence):
    """A plan whose minibatch b consists of minibatches kb to kb + k - 1 of the underlying plan.

    Args:
        plan: the underlying plan.
        k: number of joined minibatches; the last one of an epoch may have fewer.
    """

    def __init__(self, plan: BatchPlan, k: int) -> None:
        super().__init__(plan.num_partitions, plan.progress)
        self.num_workers, self.per_step, self.seekable = plan.num_workers, plan.per_step, plan.seekable
        self.plan = plan
        self.k = k

    def batches_per_epoch(self, partition: int) -> int:
        """See `BatchPlan`."""
        return -(-self.plan.batches_per_epoch(partition) // self.k)

    def batches_in(self, partition: int, epoch: int) -> int:
        """See `BatchPlan`."""
        return -(-self.plan.batches_in(partition, epoch) // self.k)

    def done_with(self, num_epochs: int, refs: Iterable[BatchRef]) -> DataProgress:
        """See `BatchPlan`."""
        return self.plan.done_with(num_epochs, (part for ref in refs for part in self.parts(ref)))

    def size(self, ref: BatchRef) -> int | None:
        """See `BatchPlan`; None if the size of a part is unknown."""
        total = 0
        for part in self.parts(ref):
            size = self.plan.size(part)
            if size is None:
                return None
            total += size
        return total

    def likely_size(self, ref: BatchRef) -> int:
        """See `BatchPlan`."""
        return sum(self.plan.likely_size(part) for part in self.parts(ref))

    def reassign(self, epoch: int, batch: int, sizes: Sequence[int], *, until: int | None = None) -> None:
        """See `RoundPlan`; rounds are joined rounds."""
        assert isinstance(self.plan, RoundPlan)
        self.plan.reassign(epoch, batch * self.k, sizes, until=None if until is None else until * self.k)

    def sizes(self, epoch: int, batch: int) -> tuple[int, ...]:
        """See `RoundPlan`; the sizes are those of each part of a joined round."""
        assert isinstance(self.plan, RoundPlan)
        return self.plan.sizes(epoch, batch * self.k)

    def parts(self, ref: BatchRef) -> list[BatchRef]:
        """The minibatches of the underlying plan that are joined in this one."""
        stop = min(ref.stop * self.k, self.plan.batches_in(ref.partition, ref.epoch))
        starts = range(ref.batch * self.k, stop, ref.count)
        return [BatchRef(ref.epoch, ref.partition, batch, min(ref.count, stop - batch)) for batch in starts]

    def __repr__(self) -> str:
        return f"{self.k} joined of {self.plan!r}"


def parts_of(plan: BatchPlan, ref: BatchRef) -> Sequence[BatchRef]:
    """The minibatches to read for a minibatch: itself, or its parts if it is joined."""
    return plan.parts(ref) if isinstance(plan, JoinedPlan) else [ref]


def ids_of(plan: BatchPlan, ref: BatchRef) -> list[int] | None:
    """The sample ids of a minibatch, in order; None if samples have no ids."""
    whole = unjoined(plan)
    if not isinstance(whole, EpochPlan):
        return None
    return [number for part in parts_of(plan, ref) for number in whole.ids(part).tolist()]


def unjoined(plan: BatchPlan) -> BatchPlan:
    """The plan that a feed reads by: the underlying plan of a joined one, or the plan itself."""
    return plan.plan if isinstance(plan, JoinedPlan) else plan
