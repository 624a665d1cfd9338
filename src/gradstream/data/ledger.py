"""The data ledger: which minibatches are in the model. `leases.py` says which worker has the others.

If a quorum makes each update, its decision about a round accounts for all minibatches of the round
(`record_decision`). Without rounds, workers ask for minibatches, which the ledger's `leases` give them.

Receipts come in any order and more than once. The minibatches of a sequence have numbers k over all epochs
(`BatchPlan.nth`); see `data.leases` for the memory that they take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gradstream.data.base import BatchPlan, BatchRef, DataProgress
from gradstream.data.leases import AssignableBatches, Leases
from gradstream.errors import ConfigError, InternalError


@dataclass(slots=True)
class EpochCounts:
    """Counts of one data epoch."""

    received: int = 0  # numbers with a receipt
    batches: int = 0  # receipts
    dropped: int = 0  # samples that are not in the model
    reassigned: int = 0  # receipts of minibatches that were assigned to another worker before


class Ledger:
    """Accounts for every minibatch of a run, without I/O. The coordinator calls it.

    Minibatches without samples (of a worker without a share in a round) need receipts as well.

    Args:
        plan: the division of the data.
        epochs: number of data epochs of the run.
        steps: number of minibatches of each worker over all epochs; with one sequence for all workers, the mean. At
            least one of the two limits must be given; with both, the smaller one counts.
        helping, in_passes: see `Leases`.

    Raises:
        ConfigError: there is no limit, or one is below 1.

    Attributes:
        leases: the minibatches that workers have, and can get.
        num_workers: number of workers, with those that have come on the way; ranks are below it.
        num_epochs: number of data epochs of the run; with a limit on steps the last ones may be incomplete.
        num_complete: number of data epochs, from the first one on, that have all their receipts.
        num_receipts: number of minibatches with a receipt.
        num_samples: number of their samples; None if unknown.
    """

    KEPT = (
        "num_workers",
        "num_complete",
        "_sequences",
        "_counts",
        "leases",
        "_left_out",
        "num_receipts",
        "num_samples",
    )
    """See `coordinator.durable`."""

    def __init__(
        self,
        plan: BatchPlan,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        helping: bool = True,
        in_passes: bool = False,
    ) -> None:
        for what, limit in (("epochs", epochs), ("steps", steps)):
            if limit is not None and limit < 1:
                raise ConfigError(f"{what}={limit}: expected at least 1")
        if epochs is None and steps is None:
            raise ConfigError(
                "got neither epochs nor steps, so the run would have no end: give epochs or steps"
            )
        self.plan = plan
        self.num_workers = plan.num_workers
        self._sequences: list[AssignableBatches] = []
        for partition in range(plan.num_partitions):
            limits = [plan.batches_before(partition, epochs)] if epochs is not None else []
            if steps is not None:
                limits.append(steps * plan.per_step if plan.batches_per_epoch(partition) else 0)
            self._sequences.append(AssignableBatches(total=min(limits)))
        self.leases = Leases(plan, self._sequences, helping=helping, in_passes=in_passes)
        totals = [sequence.total for sequence in self._sequences]
        lasts = [plan.nth(number, total - 1).epoch for number, total in enumerate(totals) if total]
        self.num_epochs = max(lasts, default=-1) + 1
        self.num_complete = min(plan.progress.epochs, self.num_epochs)
        self._counted = (-1, 0)  # an epoch, and the number of its minibatches
        self._counts: defaultdict[int, EpochCounts] = defaultdict(EpochCounts)  # by epoch
        self._left_out: set[int] = set()  # skipped rounds
        self.num_receipts = 0
        self.num_samples: int | None = 0

    @property
    def num_rounds(self) -> int:
        """The mean number of receipts of a worker; with rounds, the number of rounds."""
        return self.num_receipts // self.plan.num_workers

    @property
    def finished(self) -> bool:
        """Whether every minibatch of the run has a receipt."""
        return self.num_complete == self.num_epochs

    def receipt(self, ref: BatchRef, worker: int) -> bool:
        """Notes that a minibatch of a worker is in the model.

        Returns:
            True the first time. A repeated receipt, from any worker, changes nothing.

        Raises:
            InternalError: the run has no such minibatch.
        """
        sequence, first = self._place(ref)
        self.leases.put_down(worker, ref.partition, first)
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
        if self.leases.forget_again(ref.partition, first):
            counts.reassigned += 1
        if self.leases.forget_refusal(ref.partition, first):
            self._drop(ref)
        while not self.finished and self.missing(self.num_complete) == 0:
            self.num_complete += 1
        return True

    def refuse(self, ref: BatchRef, samples: int) -> None:
        """Notes that a worker's gradient was refused: with its receipt, the minibatch counts as dropped.

        Should the worker be lost before, another one computes the minibatch, and it counts as any other.

        Raises:
            InternalError: the run has no such minibatch.
        """
        del samples  # the plan knows
        sequence, first = self._place(ref)
        if sequence.received(first):  # a quorum's decision was faster
            self._drop(ref)
        else:
            self.leases.refuse(ref.partition, first)

    def refuse_round(self, ref: BatchRef) -> None:
        """Notes that a round is skipped because a worker's gradient was refused. Repeating it changes nothing."""
        _, k = self._place(ref)
        if k not in self._left_out:
            self._left_out.add(k)
            for partition in range(len(self._sequences)):
                self.refuse(self.plan.nth(partition, k), 0)

    def _drop(self, ref: BatchRef) -> None:
        """Counts the samples of a minibatch that has its receipt as dropped."""
        size = self.plan.size(ref) or 0
        self._counts[ref.epoch].dropped += size
        self.num_samples = None if self.num_samples is None else self.num_samples - size

    def knows(self, ref: BatchRef, worker: int) -> bool:
        """Whether the run has such a minibatch. Any worker may compute it."""
        del worker
        inside = 0 <= ref.partition < len(self._sequences) and 0 <= ref.epoch < self.num_epochs
        return inside and 0 <= ref.batch < ref.stop <= self._span(ref.partition, ref.epoch)

    def has_round(self, k: int) -> bool:
        """Whether every partition has a k-th minibatch."""
        return 0 <= k < min(sequence.total for sequence in self._sequences)

    @property
    def most_begun(self) -> int:
        """The most minibatches that one worker can have begun: all minibatches of the run."""
        return sum(sequence.total for sequence in self._sequences)

    @property
    def num_planned(self) -> int:
        """The number of minibatches of the run; an estimate if sizes differ."""
        return self.most_begun * self.plan.num_workers // (self.plan.per_step * len(self._sequences))

    def record_decision(self, k: int, ranks: Collection[int]) -> tuple[BatchRef, ...]:
        """Records a quorum's decision about round k: the minibatches of `ranks` are in the model, others are not.

        The decision is the receipt of all of them, also of workers that are lost. Repeating it changes nothing.

        Returns:
            The minibatches, by rank.

        Raises:
            InternalError: the run has no such round.
        """
        refs = tuple(self.plan.nth(partition, k) for partition in range(len(self._sequences)))
        for partition, ref in enumerate(refs):
            if partition not in ranks:
                self.leases.forget_refusal(partition, k)  # dropped once
            if self.receipt(ref, partition) and partition not in ranks:
                self._drop(ref)
        return refs

    @property
    def dropped(self) -> Mapping[int, int]:
        """By data epoch, the number of samples that updates skipped, as far as it is known."""
        return {epoch: counts.dropped for epoch, counts in sorted(self._counts.items()) if counts.dropped}

    def came(self, rank: int) -> None:
        """Notes that a worker is there, perhaps one more than at the beginning."""
        self.num_workers = max(self.num_workers, rank + 1)

    def lost(self, rank: int) -> int:
        """Takes back the minibatches of a lost worker, for others.

        Minibatches with a receipt stay done. If a receipt did not arrive, its minibatch is computed again. A second
        call changes nothing.

        Returns:
            The number of minibatches that the worker had.

        Raises:
            InternalError: no such rank.
        """
        if not 0 <= rank < self.num_workers:
            raise InternalError(
                f"got the loss of worker {rank}; expected a rank that the ledger knows, 0 to {self.num_workers - 1}"
            )
        return self.leases.lost(rank)

    def settle_rounds(self, rank: int) -> None:
        """Adds the receipts of a worker for all rounds up to the latest of which another worker has one.

        For rounds that need every worker: one receipt tells that the whole round is in the model, and all before it.
        """
        last, sequence = self.latest(but=(rank,)), self._sequences[rank]
        while (k := sequence.next_missing(0)) <= min(last, sequence.total - 1):
            self.receipt(self.plan.nth(rank, k), rank)

    def latest(self, but: Collection[int]) -> int:
        """The number of the latest round of which a worker has a receipt, not counting these ranks; -1 for none."""
        others = [sequence for rank, sequence in enumerate(self._sequences) if rank not in but]
        return max((max(sequence.ahead, default=sequence.low - 1) for sequence in others), default=-1)

    def leave_out(self, rank: int, until: int) -> None:
        """Adds the receipts of a worker for all rounds below `until`, and counts those that were missing as dropped."""
        sequence = self._sequences[rank]
        while (k := sequence.next_missing(0)) < min(until, sequence.total):
            ref = self.plan.nth(rank, k)
            self.receipt(ref, rank)
            self._drop(ref)

    # ---- figures ------------------------------------------------------------------------

    def batches(self, epoch: int) -> int:
        """The number of minibatches of a data epoch, over all sequences; of units if sizes differ."""
        if (
            self._counted[0] != epoch
        ):  # each receipt asks for the same epoch, and there may be many partitions
            self._counted = (
                epoch,
                sum(self._span(partition, epoch) for partition in range(len(self._sequences))),
            )
        return self._counted[1]

    def samples(self, epoch: int) -> int | None:
        """The number of samples of a data epoch, without those that were done when the plan began.

        It is that of the data set, unless steps end the run before. None for a stream, whose size is unknown.
        """
        total = 0
        for partition in range(len(self._sequences)):
            for batch in range(self._span(partition, epoch)):
                size = self.plan.size(BatchRef(epoch, partition, batch))
                if size is None:
                    return None
                total += size
        return total

    def progress(self) -> DataProgress:
        """The samples in the model: those of minibatches with a receipt, and those that the plan skipped."""
        first = self.num_complete
        if first and first == self.num_epochs and not self._is_whole(first - 1):
            first -= 1  # it was complete for this run, which steps have ended inside of it
        last = max((epoch for epoch, counts in self._counts.items() if counts.received), default=-1)
        refs = (
            BatchRef(epoch, partition, batch)
            for epoch in range(first, max(last, self.num_complete - 1) + 1)
            for partition, sequence in enumerate(self._sequences)
            for batch in range(self._span(partition, epoch))
            if sequence.received(self.plan.batches_before(partition, epoch) + batch)
        )
        return self.plan.done_with(first, refs)

    def _is_whole(self, epoch: int) -> bool:
        """Whether the run goes through all minibatches of a data epoch."""
        partitions = range(len(self._sequences))
        return all(
            self._span(partition, epoch) == self.plan.batches_in(partition, epoch) for partition in partitions
        )

    def num_batches(self, epoch: int) -> int:
        """The number of minibatches of a data epoch with a receipt."""
        return self._counts[epoch].batches

    def missing(self, epoch: int) -> int:
        """The number of minibatches of a data epoch without a receipt; of units if sizes differ."""
        return self.batches(epoch) - self._counts[epoch].received

    def complete(self, epoch: int) -> bool:
        """Whether every minibatch of data epochs 0 … `epoch` has a receipt."""
        return self.num_complete >= min(epoch + 1, self.num_epochs)

    def reassigned(self, epoch: int) -> int:
        """The number of minibatches of a data epoch that were assigned again, for example after a loss."""
        return self._counts[epoch].reassigned

    def reported(self, epoch: int) -> None:
        """Frees the counts of a complete data epoch, but for what was dropped: nobody asks for them again."""
        counts = self._counts.pop(epoch, None)
        if counts is not None and counts.dropped:
            self._counts[epoch] = EpochCounts(dropped=counts.dropped)

    def _span(self, partition: int, epoch: int) -> int:
        first = self.plan.batches_before(partition, epoch)
        return max(0, min(self.plan.batches_in(partition, epoch), self._sequences[partition].total - first))

    def _place(self, ref: BatchRef) -> tuple[AssignableBatches, int]:
        inside = 0 <= ref.partition < len(self._sequences) and ref.epoch >= 0
        if inside and 0 <= ref.batch < ref.stop <= self._span(ref.partition, ref.epoch):
            k = self.plan.batches_before(ref.partition, ref.epoch) + ref.batch
            return self._sequences[ref.partition], k
        raise InternalError(f"got a receipt for {ref}, which is no minibatch of this run: {self.plan!r}")
