"""The interfaces of data sets, and of the division of their samples into minibatches.

A minibatch has a name, `BatchRef`. Its samples are a pure function of this name and the run's seed, so any worker,
simulation or resumed run can read any minibatch without those before it. A `BatchPlan` divides each epoch into
minibatches, and a `Feed` reads them. `data.feed` makes both for a data set whose samples have ids. A stream, whose
samples have no ids, brings its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from gradstream.errors import ConfigError
from gradstream.model.base import Batch
from gradstream.untrusted import check_value

# ---- progress ----------------------------------------------------------------------------
# The samples of each data epoch that are in the model, from which a resumed run continues.
#
# They are positions in the order of each epoch, which does not depend on the number of workers or on the sizes of their
# minibatches. So another number of workers continues at the right sample.

MAX_DIGITS = 15

Run = tuple[int, int]
"""Positions [start, stop) in the order of an epoch."""


@dataclass(frozen=True, slots=True)
class DataProgress:
    """The samples in the model.

    Args:
        epochs: all samples of data epochs 0 … epochs-1 are in the model.
        parts: by later epoch, the runs of positions in the model, sorted and apart from one another.
    """

    epochs: int = 0
    parts: Mapping[int, Sequence[Run]] = field(default_factory=dict)

    @property
    def horizon(self) -> int:
        """The first of the data epochs of which nothing is in the model."""
        return max([self.epochs, *(epoch + 1 for epoch in self.parts)])

    def runs(self, epoch: int, num_samples: int) -> Sequence[Run]:
        """The runs of an epoch of `num_samples` samples that are in the model."""
        if epoch < self.epochs:
            return ((0, num_samples),)
        return self.parts.get(epoch, ())

    def count(self, num_samples: int, epoch: int | None = None) -> int:
        """The number of samples in the model, of all epochs or of one."""
        if epoch is None:
            return self.epochs * num_samples + sum(self.count(num_samples, epoch) for epoch in self.parts)
        return sum(stop - start for start, stop in self.runs(epoch, num_samples))

    def left(self, epoch: int, num_samples: int) -> Sequence[Run]:
        """The runs of an epoch that are not in the model."""
        edges = [0, *(edge for run in self.runs(epoch, num_samples) for edge in run), num_samples]
        gaps = list(pairwise(edges))[::2]
        return tuple((start, stop) for start, stop in gaps if start < stop)

    def as_json(self) -> dict[str, Any]:
        """The value for a JSON document, which `of_json` reads."""
        parts = {str(epoch): [list(run) for run in runs] for epoch, runs in self.parts.items()}
        return {"epochs": self.epochs, "parts": parts}

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> DataProgress:
        """The progress from a value that `as_json` has made. Raises ConfigError for another value."""
        try:
            check_value(dict(record), Mapping[str, int | Mapping[str, Sequence[Run]]], "done")
            parts = {_number(epoch): merged(map(_run, runs)) for epoch, runs in record["parts"].items()}
            return cls(_number(record["epochs"]), parts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"the record of the samples in the model is damaged ({error!r}): resume from another checkpoint"
            ) from error


def _number(value: int | str) -> int:
    number = int(value) if len(str(value)) <= MAX_DIGITS else -1
    if number < 0:
        raise ValueError(f"{str(value)[:40]!r}: expected a number from 0 on")
    return number


def _run(run: Run) -> Run:
    return _number(run[0]), _number(run[1])


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same positions as sorted runs that do not touch one another, without empty ones."""
    out: list[Run] = []
    for start, stop in sorted(runs):
        if start >= stop:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return tuple(out)


# ---- data sets ---------------------------------------------------------------------------

Ids = np.ndarray[Any, np.dtype[np.int64]]

Partitioning: TypeAlias = Literal["rounds", "queue", "partitions"]
"""How a run divides its data among workers; see `PartitionSpec`."""

DEFAULT_BATCH_SIZE = 32
"""Samples of a minibatch of one worker, unless the job sets another number."""


class Dataset(Protocol):
    """Training samples by id, and optionally held-out samples for evaluation.

    `num_samples` is None for a stream of unknown length. A data set may have an attribute `checksum`, a string that the
    machines of a run compare. It may have two more methods; with the second one it needs no `batch`:

        plan(spec: PartitionSpec) -> BatchPlan
        feed(plan: BatchPlan, rank: int, seed: int) -> Feed
    """

    name: str
    num_test_samples: int

    @property
    def num_samples(self) -> int | None:
        """The number of training samples; an attribute is enough."""
        ...

    def batch(self, ids: Ids) -> Batch:
        """The training samples with these ids, in this order."""
        ...

    def test_batch(self, ids: Ids) -> Batch:
        """The held-out samples with these ids, in this order."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class BatchRef:
    """The name of a minibatch: number `batch` of `partition` in data epoch `epoch`, all from 0.

    If minibatches differ in size, `batch` counts units of samples, and the minibatch has `count` units.
    """

    epoch: int
    partition: int
    batch: int
    count: int = 1

    @property
    def stop(self) -> int:
        """The number of the next minibatch."""
        return self.batch + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSpec:
    """How a run divides its data.

    Args:
        partitioning: "rounds", in which all workers take part; one "queue", from which workers take minibatches when
            they need them; or "partitions", one for each worker, of which others take the rest at the end.
        batch_size: samples of a worker's minibatch, one number for all or one for each worker.
        workers: number of workers.
        seed: seed of the order of samples.
        shares: relative amounts of data, one for each worker; None derives them from the batch sizes, "measured"
            from the speed of the workers.
        epochs, steps: length of the run; one of them may be None.
        progress: samples that are already in the model, which the plan skips.
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
    """Divides each epoch into partitions, and these into minibatches. Pure. `BatchSequence` is a base class for it."""

    @property
    def num_partitions(self) -> int:
        """The number of sequences of minibatches: one for each worker, or one for all."""
        ...

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        ...

    @property
    def per_step(self) -> int:
        """The number of minibatches that a step takes from a sequence: all workers' together; 1 of a worker's own."""
        ...

    @property
    def seekable(self) -> bool:
        """Whether a worker reads any minibatch as fast as those of its own sequence."""
        ...

    @property
    def progress(self) -> DataProgress:
        """The samples in the model of a resumed run, which are in no minibatch of this plan."""
        ...

    def batches_per_epoch(self, partition: int) -> int:
        """The number of minibatches of a partition in a whole epoch."""
        ...

    def batches_in(self, partition: int, epoch: int) -> int:
        """The number of minibatches of a partition in data epoch `epoch`.

        In a resumed run, the minibatches that are in the model already do not count.
        """
        ...

    def batches_before(self, partition: int, epoch: int) -> int:
        """The number of minibatches of a partition in data epochs 0 … epoch-1, counted as in `batches_in`."""
        ...

    def nth(self, partition: int, k: int) -> BatchRef:
        """The k-th minibatch of a partition, counted from 0 over all epochs."""
        ...

    def done_with(self, num_epochs: int, refs: Iterable[BatchRef]) -> DataProgress:
        """The progress of a run whose model has the first `num_epochs` epochs and these minibatches of later ones."""
        ...

    def size(self, ref: BatchRef) -> int | None:
        """The number of samples of a minibatch; None if it must be read to find out."""
        ...

    def likely_size(self, ref: BatchRef) -> int:
        """The number of samples, or a guess if it is unknown, for simulations that read nothing."""
        ...


class Feed(Protocol):
    """Reads the minibatches of one worker, on its arithmetic thread."""

    def read(self, ref: BatchRef) -> Batch:
        """The samples of a minibatch. The feed is fastest for the worker's own minibatches in order.

        Raises:
            DataError: there is no such minibatch, or it is invalid; the message names rank and batch.
        """
        ...
