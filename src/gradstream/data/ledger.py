"""The data ledger: which minibatches are in the model, and which nobody has begun.

Where a quorum makes each update, a round's verdict accounts for all of its minibatches at once (`verdict`).

Without rounds, minibatches are handed out to workers that ask (`hand_out`). A plan has one sequence of
minibatches for all workers, or one for each. A worker gets the next ones of its own sequence, unless another sequence
is behind by an epoch: a worker that is done with its part of an epoch helps the others to finish theirs. What
a lost worker had in hand without a receipt is handed out again.

Receipts come in any order and more than once.

A sequence's minibatches, over all epochs, have sequence numbers k (`BatchPlan.nth`). What is kept is a low-water mark
in the sequence and the few numbers received ahead of it, so the memory is that of the disorder and not of the
length of the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from gradstream.data.base import BatchPlan, BatchRef
from gradstream.data.done import DataProgress
from gradstream.data.receipts import AssignableBatches
from gradstream.errors import ConfigError, InternalError

__all__ = ["Ledger", "Unassigned"]


@dataclass(slots=True)
class _EpochCounts:
    """What the ledger has counted of one data epoch."""

    received: int = 0  # numbers with a receipt
    batches: int = 0  # receipts
    dropped: int = 0  # samples that are not in the model
    reassigned: int = 0  # receipts of minibatches that another worker had before


@dataclass(frozen=True, slots=True)
class Unassigned:
    """What there is to hand out to a worker.

    Args:
        epoch: minibatches of the oldest epoch that has some; units, where sizes differ.
        run: to the end of the run.
    """

    epoch: int
    run: int


class Ledger:
    """Accounts for every minibatch of a run. No I/O: the coordinator feeds it and asks it.

    Minibatches without samples (a worker without a share in a round) need receipts as well.

    Args:
        plan: how the data is cut.
        epochs: how many data epochs the run has.
        steps: how many minibatches each worker has in all, over its epochs; of a sequence for all workers, the
            mean. At least one of the two limits is given; with both, the smaller counts.
        helping: a worker that is done with its own sequence of an epoch is given of the others' sequences. False:
            only of those of workers that are lost, or held back.

    Raises:
        ConfigError: no limit, or one below 1.
    """

    def __init__(
        self,
        plan: BatchPlan,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        helping: bool = True,
    ) -> None:
        for what, limit in (("epochs", epochs), ("steps", steps)):
            if limit is not None and limit < 1:
                raise ConfigError(f"{what} must be at least 1, got {limit}")
        if epochs is None and steps is None:
            raise ConfigError("a run needs an end: give epochs or steps")
        self.plan = plan
        self.helping = helping or plan.num_partitions == 1
        self._sequences = []
        for partition in range(plan.num_partitions):
            limits = [plan.batches_before(partition, epochs)] if epochs is not None else []
            if steps is not None:
                limits.append(steps * plan.per_step if plan.batches_per_epoch(partition) else 0)
            self._sequences.append(AssignableBatches(total=min(limits)))
        totals = [sequence.total for sequence in self._sequences]
        lasts = [plan.nth(number, total - 1).epoch for number, total in enumerate(totals) if total]
        self._num_epochs = max(lasts, default=-1) + 1
        # Data epochs, from the first on, of which nothing is missing.
        self._num_complete = min(plan.progress.epochs, self._num_epochs)
        self._counted = (-1, 0)  # an epoch, and how many minibatches it has
        self._counts: defaultdict[int, _EpochCounts] = defaultdict(_EpochCounts)  # by epoch
        self._hands: defaultdict[int, dict[tuple[int, int], int]] = defaultdict(dict)
        """By worker, what it has: (sequence, k) -> count."""
        self._again: set[tuple[int, int]] = set()  # of these, those that another had before
        self._lost: set[int] = set()
        self._held: set[int] = set()
        self.num_receipts = 0
        self.num_samples: int | None = 0  # of minibatches with a receipt; None where nobody counts them

    @property
    def num_rounds(self) -> int:
        """How many minibatches of each worker have a receipt, in the mean: rounds, where there are rounds."""
        return self.num_receipts // self.plan.num_workers

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
        sequence, first = self._place(ref)
        self._hands[worker].pop((ref.partition, first), None)
        new = [k for k in range(first, first + ref.count) if not sequence.received(k)]
        if not new:
            return False
        for k in new:
            sequence.add(k)
        counts = self._counts[ref.epoch]
        counts.received += len(new)
        counts.batches += 1
        self.num_receipts += 1
        units = [ref] if len(new) == ref.count else [self.plan.nth(ref.partition, k) for k in new]
        for size in map(self.plan.size, units):
            self.num_samples = None if size is None or self.num_samples is None else self.num_samples + size
        if (ref.partition, first) in self._again:
            self._again.remove((ref.partition, first))
            counts.reassigned += 1
        while not self.finished and self.missing(self._num_complete) == 0:
            self._num_complete += 1
        return True

    def knows(self, ref: BatchRef, worker: int) -> bool:
        """Whether the run has such a minibatch, for any worker to do."""
        del worker
        inside = 0 <= ref.partition < len(self._sequences) and 0 <= ref.epoch < self._num_epochs
        return inside and 0 <= ref.batch < ref.stop <= self._span(ref.partition, ref.epoch)

    def has_round(self, k: int) -> bool:
        """Whether every partition has a k-th minibatch."""
        return 0 <= k < min(sequence.total for sequence in self._sequences)

    @property
    def most_begun(self) -> int:
        """The most minibatches that one worker can have begun: all of the run."""
        return sum(sequence.total for sequence in self._sequences)

    @property
    def num_planned(self) -> int:
        """How many minibatches the run has; where sizes differ, about how many."""
        return self.most_begun * self.plan.num_workers // (self.plan.per_step * len(self._sequences))

    def verdict(self, k: int, ranks: Collection[int]) -> tuple[BatchRef, ...]:
        """Every partition's k-th minibatch has met its fate: those of `ranks` are in the model, others not.

        That is its receipt, so it does not matter whether a worker lived to tell. Hearing it again changes
        nothing.

        Returns:
            The minibatches, by rank.

        Raises:
            InternalError: the run has no such round.
        """
        refs = tuple(self.plan.nth(partition, k) for partition in range(len(self._sequences)))
        for partition, ref in enumerate(refs):
            if self.receipt(ref, partition) and partition not in ranks:
                size = self.plan.size(ref) or 0
                self._counts[ref.epoch].dropped += size
                self.num_samples = None if self.num_samples is None else self.num_samples - size
        return refs

    @property
    def dropped(self) -> Mapping[int, int]:
        """By data epoch, samples that a quorum has left out, where it is known how many they were."""
        return {epoch: counts.dropped for epoch, counts in sorted(self._counts.items()) if counts.dropped}

    # ---- handing out --------------------------------------------------------------------

    def unassigned(self, taker: int) -> Unassigned:
        """What there is to hand out to a worker now. Nothing for one that is lost."""
        number = None if taker in self._lost else self._next_sequence(taker)
        if number is None:
            return Unassigned(0, 0)
        k = self._sequences[number].first()
        assert k is not None
        behind = self.plan.nth(number, k).epoch + 1
        open_to_it = [other for other in range(len(self._sequences)) if self._is_open(other, taker)]
        stops = {other: self.plan.batches_before(other, behind) for other in open_to_it}
        epoch = sum(self._sequences[other].num_free(stop) for other, stop in stops.items())
        return Unassigned(epoch, sum(self._sequences[other].num_free() for other in open_to_it))

    def _is_open(self, number: int, taker: int) -> bool:
        """Whether a worker may be given of a sequence."""
        return self.helping or number == taker or number in self._lost or number in self._held

    def hand_out(self, taker: int, limit: int, size: int = 1) -> tuple[BatchRef, ...]:
        """Hands up to `limit` minibatches to a worker, those of the oldest epoch first.

        Args:
            taker: its rank.
            limit: how many at most. Fewer where there are not so many, none for a worker that is lost.
            size: units of each; what is left of an epoch, or of what another had, may be less.
        """
        handed: list[BatchRef] = []
        while len(handed) < limit and taker not in self._lost:
            number = self._next_sequence(taker)
            if number is None:
                break
            handed.append(self._hand_out(number, taker, size))
        return tuple(handed)

    def _hand_out(self, number: int, taker: int, size: int) -> BatchRef:
        """The first minibatch of a sequence that has one."""
        sequence = self._sequences[number]
        first = sequence.first()
        assert first is not None
        again = bool(sequence.returned)
        k, count = sequence.take(size, self._stop(number, first))
        self._hands[taker][number, k] = count
        if again:
            self._again.add((number, k))
        return replace(self.plan.nth(number, k), count=count)

    def in_hand(self, worker: int) -> int:
        """How many minibatches a worker has been handed that have no receipt."""
        return len(self._hands[worker])

    def lost(self, rank: int) -> int:
        """A worker is gone: what it had in hand is handed out again.

        Minibatches with a receipt stay done. One that was trained without its receipt having
        arrived is trained again. Calling twice changes nothing.

        Returns:
            How many minibatches it had.

        Raises:
            InternalError: no such rank.
        """
        if not 0 <= rank < self.plan.num_workers:
            raise InternalError(f"worker {rank} was lost; the ledger knows 0 to {self.plan.num_workers - 1}")
        self._lost.add(rank)
        return self._take_back(rank)

    def hold(self, rank: int) -> int:
        """A worker is held back: others get what it has in hand, none of it begun, and of its sequence.

        Returns:
            How many minibatches it had in hand.
        """
        self._held.add(rank)
        return self._take_back(rank)

    def let_in(self, rank: int) -> None:
        """A worker takes part again."""
        self._held.discard(rank)

    def _take_back(self, rank: int) -> int:
        hand = self._hands.pop(rank, {})
        for (number, k), count in hand.items():
            self._again.discard((number, k))
            self._sequences[number].give_back((k, count))
        return len(hand)

    def _next_sequence(self, taker: int) -> int | None:
        """The sequence that a worker is given of: of the oldest epoch, its own before others.

        A sequence that only its own worker reads fast is left to that, until it is lost or there is nothing else.
        """
        if len(self._sequences) == 1:
            return None if self._sequences[0].first() is None else 0
        found: tuple[tuple[int, int, int], int] | None = None
        for number, sequence in enumerate(self._sequences):
            k = sequence.first()
            if k is None or not self._is_open(number, taker):
                continue
            epoch, free = self.plan.nth(number, k).epoch, sequence.num_free()
            if not (self.plan.seekable or number == taker or number in self._lost | self._held):
                epoch = self._num_epochs  # after everything else
            rank = epoch, int(number != taker), -free
            if found is None or rank < found[0]:
                found = rank, number
        return None if found is None else found[1]

    def _stop(self, number: int, k: int) -> int:
        """Where the epoch of a sequence's k-th minibatch ends in it."""
        return min(
            self._sequences[number].total,
            self.plan.batches_before(number, self.plan.nth(number, k).epoch + 1),
        )

    # ---- figures ------------------------------------------------------------------------

    def batches(self, epoch: int) -> int:
        """How many minibatches a data epoch of this run has, over all sequences; units, where sizes differ."""
        if self._counted[0] != epoch:  # each receipt asks for the same epoch; partitions may be many
            self._counted = (
                epoch,
                sum(self._span(partition, epoch) for partition in range(len(self._sequences))),
            )
        return self._counted[1]

    def samples(self, epoch: int) -> int | None:
        """How many samples they have together: all of the data set, unless steps end the run before.

        Samples that were done when the plan began are not counted. None in a stream: only reading tells.
        """
        total = 0
        for partition in range(len(self._sequences)):
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
            like_others = epoch >= self.plan.progress.horizon and all(
                self._span(partition, epoch) == self.plan.batches_per_epoch(partition)
                for partition in range(len(self._sequences))
            )
            samples = whole if like_others and whole is not None else self.samples(epoch)
            if samples is None:
                return None
            whole = samples if like_others else whole
            total += samples
        return total

    def progress(self) -> DataProgress:
        """What is in the model: the minibatches with a receipt, and what the plan left out."""
        last = max((epoch for epoch, counts in self._counts.items() if counts.received), default=-1)
        refs = (
            BatchRef(epoch, partition, batch)
            for epoch in range(self._num_complete, last + 1)
            for partition, sequence in enumerate(self._sequences)
            for batch in range(self._span(partition, epoch))
            if sequence.received(self.plan.batches_before(partition, epoch) + batch)
        )
        return self.plan.done_with(self._num_complete, refs)

    def num_batches(self, epoch: int) -> int:
        """How many minibatches of a data epoch have a receipt."""
        return self._counts[epoch].batches

    def missing(self, epoch: int) -> int:
        """How many minibatches of a data epoch have no receipt yet; units, where sizes differ."""
        return self.batches(epoch) - self._counts[epoch].received

    def complete(self, epoch: int) -> bool:
        """Whether every minibatch of data epochs 0 … `epoch` has a receipt."""
        return self._num_complete >= min(epoch + 1, self._num_epochs)

    def reassigned(self, epoch: int) -> int:
        """How many minibatches of a data epoch were handed out again: their first taker was lost, say."""
        return self._counts[epoch].reassigned

    def _span(self, partition: int, epoch: int) -> int:
        first = self.plan.batches_before(partition, epoch)
        return max(0, min(self.plan.batches_in(partition, epoch), self._sequences[partition].total - first))

    def _place(self, ref: BatchRef) -> tuple[AssignableBatches, int]:
        inside = 0 <= ref.partition < len(self._sequences) and ref.epoch >= 0
        if inside and 0 <= ref.batch < ref.stop <= self._span(ref.partition, ref.epoch):
            k = self.plan.batches_before(ref.partition, ref.epoch) + ref.batch
            return self._sequences[ref.partition], k
        raise InternalError(f"a receipt for {ref}, which is no minibatch of this run on {self.plan!r}")
