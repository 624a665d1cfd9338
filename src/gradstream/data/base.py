"""Data sets, and who goes through which sample when.

A minibatch has a name, `BatchRef`, and what is in it is a pure function of that name and the run's
seed: any worker, simulation or resumed run can make any minibatch without having made the ones
before. How a name becomes samples is for two objects to say: a `BatchPlan` cuts each epoch into
minibatches, a `Feed` reads them. Data sets whose samples have ids get both from here
(`data.feed.plan_of`, `feed_of`); a stream, whose samples have none, brings its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from gradstream.data.done import DataProgress
from gradstream.model.batch import Batch

__all__ = [
    "DEFAULT_BATCH_SIZE",
    "BatchPlan",
    "BatchRef",
    "Dataset",
    "Feed",
    "Ids",
    "PartitionSpec",
    "Partitioning",
]

Ids = np.ndarray[Any, np.dtype[np.int64]]

Partitioning: TypeAlias = Literal["rounds", "queue", "partitions"]
"""How data is divided among workers; see `PartitionSpec`."""

DEFAULT_BATCH_SIZE = 32
"""Samples per minibatch of one worker, where nobody says another number."""


class Dataset(Protocol):
    """Samples by id, and optionally held-out ones to evaluate on.

    `num_samples` is None in a stream that does not say. A data set may have an attribute `checksum`, a
    string, which the machines of one run compare. It may have two more methods, and one that has the
    second needs no `batch`:

        plan(spec: PartitionSpec) -> BatchPlan
        feed(plan: BatchPlan, rank: int, seed: int) -> Feed
    """

    name: str
    num_test_samples: int

    @property
    def num_samples(self) -> int | None:
        """How many samples there are to train on; a plain attribute will do."""
        ...

    def batch(self, ids: Ids) -> Batch:
        """The training samples with these ids, in this order."""
        ...

    def test_batch(self, ids: Ids) -> Batch:
        """The held-out samples with these ids, in this order."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class BatchRef:
    """Names one minibatch: the `batch`-th of `partition` in data epoch `epoch` (all from 0).

    Where minibatches differ in size, `batch` counts units of samples, and this one has `count` of them.
    """

    epoch: int
    partition: int
    batch: int
    count: int = 1

    @property
    def stop(self) -> int:
        """The number of the next one behind it."""
        return self.batch + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSpec:
    """How a run divides its data.

    Args:
        partitioning: rounds that all workers take part in; one queue from which each takes minibatches as it needs
            them; or a partition for each, of which others take what is left at the end.
        batch_size: samples a worker takes at a time: one number, or one per worker.
        workers: how many.
        seed: of the order of samples.
        shares: relative amounts of data, one per worker; None leaves it to the batch sizes, "measured" to
            the speed of the workers.
        epochs, steps: when the run ends; one may be None.
        progress: what is in the model already: the plan leaves it out.
    """

    partitioning: Partitioning
    batch_size: int | Sequence[int]
    workers: int
    seed: int
    shares: Sequence[float] | Literal["measured"] | None
    epochs: int | None
    steps: int | None
    progress: DataProgress = field(default_factory=DataProgress)


class BatchPlan(Protocol):
    """Cuts each epoch into partitions and those into minibatches. Pure. `data.line.Line` is a base for it."""

    @property
    def num_partitions(self) -> int:
        """Into how many lines of minibatches each epoch is cut: one for each worker, or one for all."""
        ...

    @property
    def num_workers(self) -> int:
        """How many workers the data is planned for."""
        ...

    @property
    def per_step(self) -> int:
        """How many minibatches of a line all workers together take in a step: 1 where each has its own."""
        ...

    @property
    def seekable(self) -> bool:
        """Whether any worker can read any minibatch as fast as those of its own line."""
        ...

    @property
    def progress(self) -> DataProgress:
        """What is in the model already, and in no minibatch of this plan: a resumed run."""
        ...

    def batches_per_epoch(self, partition: int) -> int:
        """How many minibatches a partition has in each whole epoch."""
        ...

    def batches_in(self, partition: int, epoch: int) -> int:
        """How many it has in this epoch: fewer, or none, where some of it is done."""
        ...

    def batches_before(self, partition: int, epoch: int) -> int:
        """How many it has in data epochs 0 … epoch-1."""
        ...

    def nth(self, partition: int, k: int) -> BatchRef:
        """Its k-th minibatch (from 0), counted over the epochs."""
        ...

    def done_with(self, num_epochs: int, refs: Iterable[BatchRef]) -> DataProgress:
        """What is in the model with all of `num_epochs` epochs and these minibatches of later ones."""
        ...

    def size(self, ref: BatchRef) -> int | None:
        """How many samples a minibatch has; None where only reading it tells."""
        ...

    def likely_size(self, ref: BatchRef) -> int:
        """The same where it is known, else a guess: for simulations that read nothing."""
        ...


class Feed(Protocol):
    """Reads the minibatches of one worker, on its arithmetic thread."""

    def read(self, ref: BatchRef) -> Batch:
        """The samples of a minibatch: its own in order is what it is good at, but any can be asked for.

        Raises:
            DataError: there is no such minibatch, or it makes no sense. Names rank and batch.
        """
        ...
