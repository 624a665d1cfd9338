"""The plan of a stream: the number of minibatches of each worker."""

from __future__ import annotations

from collections.abc import Iterable

from gradstream.data.base import BatchRef
from gradstream.data.batch_sequence import BatchSequence
from gradstream.data.progress import DataProgress, Run

__all__ = ["StreamPlan"]


class StreamPlan(BatchSequence):
    """The plan of a stream. The size of a minibatch is unknown until it is read.

    Since samples have no ids, progress counts batches: a resumed run continues after the last batch that every
    partition has finished.

    Args:
        counts: number of minibatches of each partition in each epoch.
        rounds: number of rounds, if all partitions take part in rounds; those beyond its count are empty for a
            partition. None without rounds.
        endless: whether one epoch of the plan is the whole run, with as many epochs of the stream as needed.
        typical_size: assumed samples of a minibatch that is not read.
        progress: batches of each partition that are in the model already.
    """

    def __init__(
        self,
        counts: tuple[int, ...],
        *,
        rounds: int | None,
        endless: bool,
        typical_size: int,
        progress: DataProgress | None = None,
    ) -> None:
        super().__init__(len(counts), progress)
        self.counts = counts
        self.rounds = rounds
        self.endless = endless
        self.typical_size = typical_size

    def batches_per_epoch(self, partition: int) -> int:
        """See `BatchPlan`."""
        return self.counts[partition] if self.rounds is None else self.rounds

    def size(self, ref: BatchRef) -> int | None:
        """See `BatchPlan`; 0 for an empty minibatch of a round, otherwise None."""
        return None if self.whole(ref).batch < self.counts[ref.partition] else 0

    def likely_size(self, ref: BatchRef) -> int:
        """See `BatchPlan`."""
        return 0 if self.size(ref) == 0 else self.typical_size

    def batches_in(self, partition: int, epoch: int) -> int:
        """See `BatchPlan`."""
        if epoch < self.progress.epochs:
            return 0
        return max(0, self.batches_per_epoch(partition) - self._num_done(epoch))

    def whole(self, ref: BatchRef) -> BatchRef:
        """The minibatch with its number in the whole epoch."""
        return BatchRef(ref.epoch, ref.partition, ref.batch + self._num_done(ref.epoch))

    def done_with(self, num_epochs: int, refs: Iterable[BatchRef]) -> DataProgress:
        """See `BatchPlan`: of each epoch, the batches before the first one that some partition has not finished."""
        there = set(refs)
        parts: dict[int, tuple[Run]] = {}
        for epoch in sorted({ref.epoch for ref in there} | set(self.progress.parts)):
            lengths = []
            for partition in range(self.num_partitions):
                total = self.batches_in(partition, epoch)
                gone = next((b for b in range(total) if BatchRef(epoch, partition, b) not in there), total)
                if gone < total:
                    lengths.append(gone)
            if epoch >= num_epochs and lengths:
                parts[epoch] = ((0, self._num_done(epoch) + min(lengths)),)
        return DataProgress(num_epochs, {epoch: runs for epoch, runs in parts.items() if runs[0][1]})

    def _num_done(self, epoch: int) -> int:
        return self.progress.parts[epoch][0][1] if epoch in self.progress.parts else 0

    def __repr__(self) -> str:
        return f"StreamPlan({self.counts} batches)"
