"""The base class of plans, which numbers a partition's minibatches over all epochs as one sequence.

A plan of a resumed run has epochs of which some or all minibatches are left out.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate

from gradstream.data.base import BatchRef
from gradstream.data.progress import DataProgress


class BatchSequence(ABC):
    """Base class of plans: derives `BatchPlan` from the number of minibatches of each epoch.

    Args:
        num_partitions: number of workers, each with its own sequence of minibatches.
        progress: see `BatchPlan`.
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
        """See `BatchPlan`."""

    def batches_in(self, partition: int, epoch: int) -> int:
        """See `BatchPlan`."""
        return 0 if epoch < self.progress.epochs else self.batches_per_epoch(partition)

    def batches_before(self, partition: int, epoch: int) -> int:
        """See `BatchPlan`."""
        edges = self._edges_of(partition)
        begun = min(epoch, len(edges) - 1)
        return edges[begun] + (epoch - begun) * self.batches_per_epoch(partition)

    def nth(self, partition: int, k: int) -> BatchRef:
        """See `BatchPlan`."""
        edges = self._edges_of(partition)
        if k < edges[-1]:
            epoch = bisect.bisect_right(edges, k) - 1
            return BatchRef(epoch, partition, k - edges[epoch])
        later, batch = divmod(k - edges[-1], self.batches_per_epoch(partition))
        return BatchRef(len(edges) - 1 + later, partition, batch)

    def done_with(self, num_epochs: int, refs: Iterable[BatchRef]) -> DataProgress:
        """See `BatchPlan`. A plan without sample ids continues at the begin of an epoch.

        A resumed run then sees some samples of that epoch again.
        """
        del refs
        return DataProgress(num_epochs)

    def _edges_of(self, partition: int) -> Sequence[int]:
        """`batches_before` of each epoch, up to the first one of which nothing is done."""
        if partition not in self._edges_by_partition:
            counts = (self.batches_in(partition, epoch) for epoch in range(self.progress.horizon))
            self._edges_by_partition[partition] = (0, *accumulate(counts))
        return self._edges_by_partition[partition]
