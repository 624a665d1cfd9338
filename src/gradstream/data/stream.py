"""Streams: data without sample ids, which each worker makes for itself, batch by batch.

A minibatch of a stream has a name like any other, (epoch, partition, batch). To read it, the feed makes the iterator of
that partition and epoch and skips the batches before it. So another worker can take over the minibatches of a lost one,
and a run can be resumed, at the cost of skipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import default_collate
from typing_extensions import override

from gradstream.data.base import BatchPlan, BatchRef, DataProgress, Dataset, Feed, Ids, PartitionSpec, Run
from gradstream.data.isolation import seeded_iterator
from gradstream.data.mapped import check_targets, collated, held_out_of
from gradstream.data.plan import BatchSequence
from gradstream.errors import ConfigError, DataError, InternalError
from gradstream.model.base import Batch

Stream = Callable[[int, int, int, int], Iterable[Any]]
"""A function (rank, world, epoch, seed) that returns batches."""


class StreamPlan(BatchSequence):
    """Divides a stream into minibatches, whose sizes are unknown until they are read.

    Samples of a stream have no ids, so the plan counts batches: a resumed run continues after the last batch that
    all partitions have finished.

    Args:
        counts: number of minibatches of each partition in an epoch.
        rounds: number of rounds in an epoch, the largest of `counts`; a partition with fewer minibatches takes part
            in the last rounds with empty ones. None under a strategy without rounds.
        endless: True if the length of the stream is unknown. The run is then one epoch of this plan, and begins the
            stream again whenever it ends.
        typical_size: number of samples that a simulation assumes for a minibatch.
        progress: batches that are in the model of a resumed run already.
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

    @override
    def batches_per_epoch(self, partition: int) -> int:
        return self.counts[partition] if self.rounds is None else self.rounds

    def size(self, ref: BatchRef) -> int | None:
        """See `BatchPlan`; 0 for an empty minibatch of a round, otherwise None."""
        return None if self.whole(ref).batch < self.counts[ref.partition] else 0

    def likely_size(self, ref: BatchRef) -> int:
        """See `BatchPlan`."""
        return 0 if self.size(ref) == 0 else self.typical_size

    @override
    def batches_in(self, partition: int, epoch: int) -> int:
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


class StreamDataset:
    """A data set of batches that a function makes. Made by `from_stream` and `from_loader`.

    Args:
        name: name for messages and records.
        stream: function (rank, world, epoch, seed) that returns an iterator of batches.
        batches: number of batches in each epoch, of each worker, or of all workers if `interleaved`; None if unknown.
        targets: key of the targets in a batch that is a dict.
        test: data set whose training samples are the held-out samples.
        interleaved: whether batch b of an epoch belongs to worker b mod W.
        lists_are_parts: see `collated`.
    """

    num_samples: int | None = None

    def __init__(
        self,
        name: str,
        stream: Stream,
        batches: int | None,
        targets: str | None,
        test: Dataset | None,
        *,
        interleaved: bool = False,
        lists_are_parts: bool = False,
    ) -> None:
        self.name = name
        self.num_test_samples = (test.num_samples or 0) if test is not None else 0
        self._stream = stream
        self._batches = batches
        self._interleaved = interleaved
        self._lists_are_parts = lists_are_parts
        self._targets = targets
        self._test = test

    def batch(self, ids: Ids) -> Batch:
        """Raises InternalError, since samples of a stream have no ids."""
        raise InternalError(f"samples of the stream {self.name!r} were requested by id")

    def test_batch(self, ids: Ids) -> Batch:
        """The held-out samples with these ids, in this order."""
        if self._test is None:
            raise DataError(
                f"data set {self.name!r} has no held-out samples: give it some with from_stream(test=...)"
            )
        return self._test.batch(ids)

    def plan(self, spec: PartitionSpec) -> StreamPlan:
        """The plan of the batches: of their declared number, or of `steps` if that is unknown.

        Raises:
            ConfigError: the job has epochs, whose length is unknown; or it has shares.
        """
        if spec.shares is not None:
            raise ConfigError(
                f"shares={spec.shares!r}: the data {self.name!r} is a stream, which each worker "
                "makes for itself; leave out shares"
            )
        if self._batches is None and spec.steps is None:
            raise ConfigError(
                f"epochs={spec.epochs}: the number of batches in an epoch of {self.name!r} is unknown; "
                "give steps= instead, or declare it: from_stream(f, batches=...), __len__ of an IterableDataset"
            )
        counts = self._counts(spec)
        size = spec.batch_size
        return StreamPlan(
            counts,
            rounds=max(counts) if spec.partitioning == "rounds" else None,
            endless=self._batches is None,
            typical_size=max(size) if isinstance(size, Sequence) else size,
            progress=spec.progress,
        )

    def _counts(self, spec: PartitionSpec) -> tuple[int, ...]:
        workers = spec.workers
        if self._batches is None:
            assert spec.steps is not None
            return (spec.steps,) * workers
        if not self._interleaved:
            return (self._batches,) * workers
        if self._batches < workers:
            raise ConfigError(
                f"workers={workers}, but {self.name!r} has {self._batches} batches an epoch; expected at least one "
                "for each worker"
            )
        return tuple(len(range(rank, self._batches, workers)) for rank in range(workers))

    def feed(self, plan: BatchPlan, rank: int, seed: int) -> Feed:
        """Reads the stream."""
        assert isinstance(plan, StreamPlan)
        return StreamFeed(self.name, self._stream, plan, seed, self._take)

    def _take(self, item: Any, where: str) -> Batch:
        return collated(item, self._targets, where, lists_are_parts=self._lists_are_parts)

    def __repr__(self) -> str:
        length = "" if self._batches is None else f" of {self._batches} batches"
        return f"<{self.name}: a stream{length}, {self.num_test_samples} test samples>"


@dataclass(slots=True)
class _Place:
    """An iterator, and the name of the minibatch that it returns next."""

    items: Iterator[Any]
    epoch: int  # epoch of the stream
    next_ref: BatchRef


class StreamFeed:
    """Reads minibatches of a stream; it skips the batches before them.

    Args:
        name: name for messages.
        stream: function (rank, world, epoch, seed) that returns an iterator of batches.
        plan: plan of the stream.
        seed: seed of the run.
        take: function (item, origin of the item) that returns a batch.
    """

    def __init__(
        self, name: str, stream: Stream, plan: StreamPlan, seed: int, take: Callable[[Any, str], Batch]
    ) -> None:
        self._name = name
        self._stream = stream
        self._plan = plan
        self._seed = seed
        self._take = take
        self._places: dict[int, _Place] = {}  # by partition

    def read(self, ref: BatchRef) -> Batch:
        """See `Feed`.

        Raises:
            DataError: the stream ends before this batch, is empty, or returns no batch.
        """
        ref = self._plan.whole(ref)
        place = self._places.get(ref.partition)
        if place is None or place.next_ref.epoch != ref.epoch or place.next_ref.batch > ref.batch:
            start = BatchRef(ref.epoch, ref.partition, 0)
            place = _Place(self._open(ref.partition, ref.epoch), ref.epoch, start)
            self._places[ref.partition] = place
        while True:
            item = self._next(place)
            here = place.next_ref
            place.next_ref = BatchRef(here.epoch, here.partition, here.batch + 1)
            if here == ref:
                return self._take(item, self._where(place.epoch, here))

    def _open(self, partition: int, epoch: int) -> Iterator[Any]:
        def make() -> Iterable[Any]:
            made = self._stream(partition, self._plan.num_partitions, epoch, self._seed)
            if not isinstance(made, Iterable):
                raise DataError(
                    f"the stream {self._name!r} returned {type(made).__name__} for rank {partition}, data epoch "
                    f"{epoch}; expected an iterator of batches"
                )
            return made

        return seeded_iterator(make, self._seed, epoch, partition)

    def _next(self, place: _Place) -> Any:
        """The next item; an endless plan continues with the next epoch of the stream."""
        fresh = False
        while True:
            for item in place.items:
                return item
            if not self._plan.endless or fresh:
                raise self._ended(place, fresh)
            place.epoch += 1
            place.items, fresh = self._open(place.next_ref.partition, place.epoch), True

    def _ended(self, place: _Place, fresh: bool) -> DataError:
        ref = place.next_ref
        if fresh:
            return DataError(
                f"the stream {self._name!r} has no batches for rank {ref.partition} "
                f"in data epoch {place.epoch}; its function must make at least one for each worker"
            )
        return DataError(
            f"the stream {self._name!r} of rank {ref.partition} ended after {ref.batch} of its "
            f"{self._plan.counts[ref.partition]} batches (data epoch {ref.epoch}): declare the number that it "
            "yields in each epoch: from_stream(f, batches=...), or __len__ of the IterableDataset"
        )

    def _where(self, epoch: int, ref: BatchRef) -> str:
        return f"batch {ref.batch} of {self._name!r} (rank {ref.partition}, data epoch {epoch})"


def from_stream(
    stream: Stream,
    *,
    batches: int | None = None,
    test: Any = None,
    targets: str | None = None,
    name: str | None = None,
) -> StreamDataset:
    """A data set from a function (rank, world, epoch, seed) that returns an iterator of batches.

    Each worker calls the function in each data epoch, and trains on the batches that it yields, in their order. The
    function sets their size; the batch size of the job has no effect. Its batches should depend only on its arguments.
    Python's, numpy's and torch's global generators are seeded by (seed, epoch, rank) for it. Other workers can then
    compute the batches of a lost worker: they call the function with its rank and skip the batches that were done.

    A batch is as in `from_dataset`: a pair (inputs, targets) of trees, or all inputs. Its number of samples is the
    length of the first axis of its arrays, or of a list with one array for each sample.

    Args:
        stream: the function. Items after the first `batches` are not read.
        batches: number of batches in each epoch; None if unknown. A run then needs `steps=` instead of `epochs=`, and
            begins the next epoch's iterator when one ends.
        test: held-out samples, as in `from_dataset`.
        targets: key of the targets if batches are dicts.
        name: name for messages and records.

    Raises:
        ConfigError, DataError: an argument is wrong.

    Example:
        >>> def batches(rank, world, epoch, seed):
        ...     for number in range(rank, 100, world):
        ...         yield np.full((8, 2), number), np.zeros(8)
        >>> from_stream(batches, batches=50)
        <batches: a stream of 50 batches, 0 test samples>
    """
    if not callable(stream):  # a user may pass anything
        raise ConfigError(
            f"from_stream: {type(stream).__name__} is no function; expected one of (rank, world, epoch, seed) "
            "that returns an iterator of batches"
        )
    if batches is not None and (type(batches) is not int or batches < 1):
        raise ConfigError(f"from_stream: batches={batches!r}; expected a whole number of at least 1, or None")
    check_targets(targets)
    name = name or str(getattr(stream, "__name__", "stream"))
    return StreamDataset(name, stream, batches, targets, held_out_of(test, default_collate, targets, name))


def interleaved_part(items: Iterable[Any], rank: int, world: int) -> Iterator[Any]:
    """Items rank, rank + world, … of items that are the same on all workers."""
    return islice(items, rank, None, world)
