"""The data ledger: which minibatches are in the model, and who makes up for a dead worker.

Where a quorum makes each update, a round's verdict accounts for all of its minibatches at once (`verdict`).

A minibatch belongs to the worker whose rank is its partition, until that worker is lost. Then
every minibatch of the partition without a receipt is an orphan, and is handed to whoever asks;
if the taker is lost too, it is an orphan again. Receipts come in any order and more than once.

A worker may also be held back for a while. Its partition is *lent* then: what is left of it is handed
out as if it were orphaned, and when the worker is let in, it goes on behind what others have taken.

A partition's minibatches, over all epochs, are one line of sequence numbers k (`Plan.nth`). What is
kept is a low-water mark in that line and the few numbers received ahead of it, so the memory is that
of the disorder and not of the length of the run.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gradstream.data.base import BatchRef, Plan
from gradstream.data.done import Done
from gradstream.errors import ConfigError, InternalError

__all__ = ["Ledger"]


@dataclass(slots=True)
class _Partition:
    """One partition's line of minibatches 0 … total-1."""

    total: int
    low: int = 0  # all below have receipts
    ahead: set[int] = field(default_factory=set)  # receipts above the low-water mark
    orphaned: bool = False  # its worker is lost, or held back
    first: int = 0  # its worker's own begin here: others have those before, or had them
    fresh: int = 0  # orphans from here on were never handed out
    returned: list[int] = field(default_factory=list)  # heap: handed out, and the taker was lost

    def received(self, k: int) -> bool:
        return k < self.low or k in self.ahead

    def receive(self, k: int) -> None:
        self.ahead.add(k)
        while self.low in self.ahead:
            self.ahead.remove(self.low)
            self.low += 1

    def next_orphan(self) -> int | None:
        """The first orphan that nobody holds; receipts that came meanwhile are passed over."""
        while self.returned and self.received(self.returned[0]):
            heapq.heappop(self.returned)
        candidates = self.returned[:1]
        if self.orphaned:
            while self.received(self.fresh):
                self.fresh += 1
            if self.fresh < self.total:
                candidates.append(self.fresh)
        return min(candidates, default=None)

    def hand_out(self, k: int) -> None:
        if self.returned and self.returned[0] == k:
            heapq.heappop(self.returned)
        else:
            self.fresh = k + 1


class Ledger:
    """Accounts for every minibatch of a run. No I/O: the coordinator feeds it and asks it.

    Minibatches without samples (a worker without a share in a round) need receipts as well.

    Args:
        plan: how the data is cut.
        epochs: how many data epochs the run has.
        max_batches_per_partition: how many minibatches each partition has in all, over its
            epochs. At least one of the two limits is given; with both, the smaller counts.

    Raises:
        ConfigError: no limit, or one below 1.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        epochs: int | None = None,
        max_batches_per_partition: int | None = None,
    ) -> None:
        for what, limit in (("epochs", epochs), ("steps", max_batches_per_partition)):
            if limit is not None and limit < 1:
                raise ConfigError(f"{what} must be at least 1, got {limit}")
        if epochs is None and max_batches_per_partition is None:
            raise ConfigError("a run needs an end: give epochs or steps")
        self.plan = plan
        self._partitions = []
        for partition in range(plan.num_partitions):
            limits = [plan.batches_before(partition, epochs)] if epochs is not None else []
            if max_batches_per_partition is not None:
                limits.append(max_batches_per_partition if plan.batches_per_epoch(partition) else 0)
            self._partitions.append(_Partition(min(limits)))
        lines = enumerate(self._partitions)
        lasts = [plan.nth(partition, line.total - 1).epoch for partition, line in lines if line.total]
        self._num_epochs = max(lasts, default=-1) + 1
        # Data epochs, from the first on, of which nothing is missing.
        self._num_complete = min(plan.done.epochs, self._num_epochs)
        self._counted = (-1, 0)  # an epoch, and how many minibatches it has
        self._received: Counter[int] = Counter()  # receipts per epoch
        self._dropped: Counter[int] = Counter()  # of those, samples by epoch that are not in the model
        self._reassigned: Counter[int] = Counter()  # of those, from another than the owner
        self._holder: dict[tuple[int, int], int] = {}  # (partition, k) handed out -> taker
        self._lost: set[int] = set()
        self.num_samples: int | None = 0  # of minibatches with a receipt; None where nobody counts them

    @property
    def num_receipts(self) -> int:
        """How many minibatches have a receipt."""
        return sum(line.low + len(line.ahead) for line in self._partitions)

    @property
    def num_rounds(self) -> int:
        """How many of each partition's minibatches have one, in the mean: rounds, where there are rounds."""
        return self.num_receipts // len(self._partitions)

    @property
    def num_complete(self) -> int:
        """How many data epochs, from the first on, have all their receipts."""
        return self._num_complete

    @property
    def num_epochs(self) -> int:
        """How many data epochs the run has; a limit on steps may leave the last ones incomplete by plan."""
        return self._num_epochs

    @property
    def finished(self) -> bool:
        """Whether every minibatch of the run has a receipt."""
        return self._num_complete == self._num_epochs

    def receipt(self, ref: BatchRef, worker: int) -> bool:
        """Notes that a minibatch of `worker`'s is in the model.

        Returns:
            True the first time. A repeated receipt, from whomever, changes nothing.

        Raises:
            InternalError: the run has no such minibatch.
        """
        line, k = self._place(ref)
        if line.received(k):
            return False
        line.receive(k)
        self._holder.pop((ref.partition, k), None)
        self._received[ref.epoch] += 1
        size = self.plan.size(ref)
        self.num_samples = None if size is None or self.num_samples is None else self.num_samples + size
        if worker != ref.partition:
            self._reassigned[ref.epoch] += 1
        while not self.finished and self.missing(self._num_complete) == 0:
            self._num_complete += 1
        return True

    def knows(self, ref: BatchRef, worker: int) -> bool:
        """Whether the run has such a minibatch, for any worker to do."""
        del worker
        inside = 0 <= ref.partition < len(self._partitions) and 0 <= ref.epoch < self._num_epochs
        return inside and 0 <= ref.batch < self._span(ref.partition, ref.epoch)

    def has_round(self, k: int) -> bool:
        """Whether every partition has a k-th minibatch."""
        return 0 <= k < min(line.total for line in self._partitions)

    @property
    def most_begun(self) -> int:
        """The most minibatches that one worker can have begun: all of the run."""
        return sum(line.total for line in self._partitions)

    def verdict(self, k: int, ranks: Collection[int]) -> tuple[BatchRef, ...]:
        """Every partition's k-th minibatch has met its fate: those of `ranks` are in the model, others not.

        That is its receipt, so it does not matter whether a worker lived to tell. Hearing it again changes
        nothing.

        Returns:
            The minibatches, by rank.

        Raises:
            InternalError: the run has no such round.
        """
        refs = tuple(self.plan.nth(partition, k) for partition in range(len(self._partitions)))
        for partition, ref in enumerate(refs):
            if self.receipt(ref, partition) and partition not in ranks:
                size = self.plan.size(ref) or 0
                self._dropped[ref.epoch] += size
                self.num_samples = None if self.num_samples is None else self.num_samples - size
        return refs

    def dropped(self, epoch: int) -> int:
        """Samples of a data epoch that a verdict has left out; those that nobody can count left out."""
        return self._dropped[epoch]

    @property
    def all_dropped(self) -> Mapping[int, int]:
        """The same by epoch."""
        return {epoch: count for epoch, count in sorted(self._dropped.items()) if count}

    def lost(self, rank: int) -> int:
        """A worker is gone: its partition, and the orphans it had taken, are orphans now.

        Minibatches with a receipt stay done. One that was trained without its receipt having
        arrived is trained again. Calling twice changes nothing.

        Returns:
            How many minibatches, over all epochs to come, became orphans.

        Raises:
            InternalError: no such rank.
        """
        if not 0 <= rank < len(self._partitions):
            raise InternalError(f"worker {rank} was lost; the ledger knows 0 to {len(self._partitions) - 1}")
        if rank in self._lost:
            return 0
        self._lost.add(rank)
        return self._let_go(rank)

    def lend(self, rank: int) -> int:
        """A worker is held back: others may take what is left of its partition, and what it had taken.

        It must have nothing under way: everything that it has begun has a receipt. Lending twice changes
        nothing.

        Returns:
            How many minibatches others may take now.
        """
        return self._let_go(rank)

    def recall(self, rank: int) -> int:
        """A worker is let in again: what nobody has taken of its partition is its own.

        Returns:
            The first of its minibatches, counted over the epochs, that is. Those before it have receipts,
            or whoever took them goes on with them.

        Raises:
            InternalError: the worker is lost.
        """
        if rank in self._lost:
            raise InternalError(f"worker {rank} was lost: it cannot be let in")
        line = self._partitions[rank]
        if line.orphaned:
            while line.received(line.fresh):
                line.fresh += 1
            line.orphaned, line.first = False, line.fresh
        return line.first

    def _let_go(self, rank: int) -> int:
        """What is left of a partition, and what its worker has taken of others, is for others to take."""
        line, count = self._partitions[rank], 0
        if not line.orphaned:
            line.orphaned, line.fresh = True, max(line.low, line.first)
            count = line.total - line.fresh - sum(k >= line.fresh for k in line.ahead)
        held = [place for place, taker in self._holder.items() if taker == rank]
        for place in held:
            del self._holder[place]
            heapq.heappush(self._partitions[place[0]].returned, place[1])
        return count + len(held)

    def orphans(self, epoch: int, limit: int, taker: int) -> tuple[BatchRef, ...]:
        """Hands up to `limit` orphans of data epochs 0 … `epoch` to a worker, oldest epoch first.

        Earlier epochs are included, since the worker may have died long after everybody else
        had finished them. A worker that has nothing of its own left asks for `num_epochs - 1`.
        Empty where there is none now (others may still lose what they hold), and for a taker
        that is itself lost.
        """
        handed: list[BatchRef] = []
        while len(handed) < limit and taker not in self._lost:
            first = self._first_orphan(epoch)
            if first is None:
                break
            partition, k = first
            line = self._partitions[partition]
            line.hand_out(k)
            self._holder[partition, k] = taker
            handed.append(self.plan.nth(partition, k))
        return tuple(handed)

    def _first_orphan(self, epoch: int) -> tuple[int, int] | None:
        """(partition, k) of an orphan of the oldest epoch that has one, `epoch` at most."""
        found = None
        oldest = epoch + 1
        for partition, line in enumerate(self._partitions):
            if not (line.orphaned or line.returned):
                continue  # as nearly always, and whoever has nothing left asks again and again
            k = line.next_orphan()
            if k is not None and (its := self.plan.nth(partition, k).epoch) < oldest:
                found, oldest = (partition, k), its
        return found

    def batches(self, epoch: int) -> int:
        """How many minibatches a data epoch of this run has, over all partitions."""
        if self._counted[0] != epoch:  # each receipt asks for the same epoch; partitions may be many
            self._counted = (
                epoch,
                sum(self._span(partition, epoch) for partition in range(len(self._partitions))),
            )
        return self._counted[1]

    def samples(self, epoch: int) -> int | None:
        """How many samples they have together: all of the data set, unless steps end the run before.

        Samples that were done when the plan began are not counted. None in a stream: only reading tells.
        """
        total = 0
        for partition in range(len(self._partitions)):
            for batch in range(self._span(partition, epoch)):
                size = self.plan.size(BatchRef(epoch, partition, batch))
                if size is None:
                    return None
                total += size
        return total

    @property
    def total_samples(self) -> int | None:
        """How many samples the run goes through, those that were done when the plan began left out.

        None in a stream: only reading tells.
        """
        total, whole = 0, None
        for epoch in range(self.num_epochs):
            like_others = epoch >= self.plan.done.horizon and all(
                self._span(partition, epoch) == self.plan.batches_per_epoch(partition)
                for partition in range(len(self._partitions))
            )
            samples = whole if like_others and whole is not None else self.samples(epoch)
            if samples is None:
                return None
            whole = samples if like_others else whole
            total += samples
        return total

    def done(self) -> Done:
        """What is in the model: the minibatches with a receipt, and what the plan left out."""
        last = max((epoch for epoch, count in self._received.items() if count), default=-1)
        refs = (
            BatchRef(epoch, partition, batch)
            for epoch in range(self._num_complete, last + 1)
            for partition, line in enumerate(self._partitions)
            for batch in range(self._span(partition, epoch))
            if line.received(self.plan.batches_before(partition, epoch) + batch)
        )
        return self.plan.done_with(self._num_complete, refs)

    def missing(self, epoch: int) -> int:
        """How many minibatches of a data epoch have no receipt yet."""
        return self.batches(epoch) - self._received[epoch]

    def complete(self, epoch: int) -> bool:
        """Whether every minibatch of data epochs 0 … `epoch` has a receipt, as in `orphans`."""
        return self._num_complete >= min(epoch + 1, self._num_epochs)

    def reassigned(self, epoch: int) -> int:
        """How many minibatches of a data epoch were done by another worker than their partition's own."""
        return self._reassigned[epoch]

    def _span(self, partition: int, epoch: int) -> int:
        first = self.plan.batches_before(partition, epoch)
        return max(0, min(self.plan.batches_in(partition, epoch), self._partitions[partition].total - first))

    def _place(self, ref: BatchRef) -> tuple[_Partition, int]:
        inside = 0 <= ref.partition < len(self._partitions) and ref.epoch >= 0
        if inside and 0 <= ref.batch < self._span(ref.partition, ref.epoch):
            k = self.plan.batches_before(ref.partition, ref.epoch) + ref.batch
            return self._partitions[ref.partition], k
        raise InternalError(f"a receipt for {ref}, which is no minibatch of this run on {self.plan!r}")
