"""A partition's minibatches over all epochs as one line: the k-th is the batch-th of an epoch.

A plan that begins in the middle has epochs of which some minibatches, or all, are not in it any more.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate

from gradstream.data.base import BatchRef
from gradstream.data.done import DataProgress

__all__ = ["BatchSequence"]


class BatchSequence(ABC):
    """Base of plans: what follows from how many minibatches each epoch has.

    Args:
        num_partitions: how many workers the data is planned for, each with a line of its own.
        progress: what is in the model already, and in no minibatch of this plan.
    """

    def __init__(self, num_partitions: int, progress: DataProgress | None = None) -> None:
        self.num_partitions = num_partitions
        self.num_workers = num_partitions
        self.per_step = 1
        self.progress = progress or DataProgress()
        self._edges_by_partition: dict[int, Sequence[int]] = {}

    seekable = False

    @abstractmethod
    def batches_per_epoch(self, partition: int) -> int:
        """How many minibatches a partition has in each whole epoch."""

    def batches_in(self, partition: int, epoch: int) -> int:
        """How many it has in this epoch: fewer, or none, where some of it is done."""
        return 0 if epoch < self.progress.epochs else self.batches_per_epoch(partition)

    def batches_before(self, partition: int, epoch: int) -> int:
        """How many minibatches a partition has in data epochs 0 … epoch-1."""
        edges = self._edges_of(partition)
        begun = min(epoch, len(edges) - 1)
        return edges[begun] + (epoch - begun) * self.batches_per_epoch(partition)

    def nth(self, partition: int, k: int) -> BatchRef:
        """The k-th minibatch (from 0) of a partition, counted over the epochs."""
        edges = self._edges_of(partition)
        if k < edges[-1]:
            epoch = bisect.bisect_right(edges, k) - 1
            return BatchRef(epoch, partition, k - edges[epoch])
        later, batch = divmod(k - edges[-1], self.batches_per_epoch(partition))
        return BatchRef(len(edges) - 1 + later, partition, batch)

    def done_with(self, num_epochs: int, refs: Iterable[BatchRef]) -> DataProgress:
        """What is in the model with all of `num_epochs` epochs and these minibatches of later ones.

        A plan that cannot tell samples apart goes on at the begin of an epoch: a resumed run then sees
        some samples of that epoch again.
        """
        del refs
        return DataProgress(num_epochs)

    def _edges_of(self, partition: int) -> Sequence[int]:
        """`batches_before` for each epoch up to the first of which nothing is done."""
        if partition not in self._edges_by_partition:
            counts = (self.batches_in(partition, epoch) for epoch in range(self.progress.horizon))
            self._edges_by_partition[partition] = (0, *accumulate(counts))
        return self._edges_by_partition[partition]
