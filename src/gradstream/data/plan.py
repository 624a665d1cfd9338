"""The order of samples in each epoch, and two plans that divide it among workers in advance.

    epoch's order   o₀ o₁ o₂ …                    a permutation, a pure function of (seed, epoch)
    RoundPlan       round r = o[rB : (r+1)B], B = Σ bᵢ; worker i takes its bᵢ of it, in rank order
    PartitionPlan   partition i = one run of the order, as long as its share; divided into minibatches

A third plan divides it when workers ask (`feed.py`). In all of them every sample is in exactly one minibatch of
every epoch. The minibatches of a round of `RoundPlan` together are the minibatch of one node with batch size B. The
number of samples of each worker may change from round to round (`reassign`), but B does not.

The plan of a resumed run (`DataProgress`) divides the rest of an epoch's order like a whole epoch. With the same batch
sizes as before, its rounds are the remaining ones.
"""

from __future__ import annotations

import bisect
import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from typing_extensions import override

from gradstream.data.base import BatchPlan, BatchRef, DataProgress, Ids, Run, merged
from gradstream.data.shares import MEASURED
from gradstream.errors import ConfigError, InternalError

# ---- batch sequence ----------------------------------------------------------------------
# The base class of plans, which numbers a partition's minibatches over all epochs as one sequence.
#
# A plan of a resumed run has epochs of which some or all minibatches are skipped.


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


# ---- plans -------------------------------------------------------------------------------

Order = Callable[[int], Ids]
"""A pure function from the data epoch to the order of its samples, one id for each position of the plan."""


@functools.lru_cache(maxsize=2)  # workers of one process are in the same epoch, or one apart
def epoch_order(num_samples: int, seed: int, epoch: int) -> Ids:
    """A permutation of 0 … num_samples-1: (num_samples,) int64, read-only.

    It is the stable order of `num_samples` raw words of Philox under the key (seed, epoch). Raw words never change
    between versions of numpy (its `permutation` may), so machines with different versions agree.

    Reference: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(num_samples), kind="stable")
    order.flags.writeable = False
    return order


class EpochPlan(BatchSequence):
    """Base class of plans for samples with ids.

    Args:
        num_samples: size of the data set.
        batch_size: samples of a worker's minibatch, one number for all or one for each worker.
        num_workers: number of workers.
        seed: seed of the order of samples, in [0, 2⁶⁴).
        shares: relative amounts of data, one for each worker, ≥ 0; None derives them from the batch sizes. "measured"
            begins with the batch sizes, which `RoundPlan.reassign` changes.
        order: order of the samples in each epoch; None takes `epoch_order` with `seed`.
        drop_last: whether to leave out the last minibatch if it is not full (the last round, in rounds).
        progress: see `BatchPlan`.

    Raises:
        ConfigError: a number is out of range, a list has the wrong length, or there are more workers than samples.
    """

    shares: Sequence[int]
    seekable = True

    def __init__(
        self,
        num_samples: int,
        batch_size: int | Sequence[int],
        num_workers: int,
        *,
        seed: int = 0,
        shares: Sequence[float] | Literal["measured"] | None = None,
        order: Order | None = None,
        drop_last: bool = False,
        progress: DataProgress | None = None,
    ) -> None:
        self.num_samples = _whole("num_samples", num_samples, least=1)
        super().__init__(_whole("number of workers", num_workers, least=1), progress)
        self.seed = _whole("seed", seed, least=0)
        if self.seed >= 1 << 64:
            raise ConfigError(f"seed must be below 2**64, got {seed}")
        self.batch_sizes = _batch_sizes(batch_size, self.num_partitions)
        self.measured = shares == MEASURED
        if shares == MEASURED:
            self._check_measured()
            shares = None
        self._weights = self._check_shares(self.batch_sizes if shares is None else shares)
        self._order = order or functools.partial(epoch_order, self.num_samples, self.seed)
        self._drop_last = drop_last
        self._left: tuple[int, Ids] | None = None  # cached: an epoch, and the rest of its order
        self._divide(batch_size, shares)
        if not any(map(self.batches_per_epoch, range(self.num_partitions))):
            raise ConfigError(
                f"drop_last drops all {self.num_samples} samples: none of the {self.num_workers} workers has enough "
                f"for a minibatch of {self.batch_sizes}; use smaller minibatches, or fewer workers"
            )

    def _check_shares(self, shares: Sequence[float]) -> tuple[Fraction, ...]:
        if len(shares) != self.num_partitions:
            raise ConfigError(
                f"shares has {len(shares)} entries for {self.num_partitions} workers; give one per worker"
            )
        for rank, share in enumerate(shares):
            if not (math.isfinite(share) and share >= 0):
                raise ConfigError(f"share of worker {rank} is {share}; it must be finite and at least 0")
        weights = tuple(map(_as_written, map(str, shares)))
        num_takers = sum(weight > 0 for weight in weights)
        if num_takers == 0:
            raise ConfigError(f"all {self.num_partitions} shares are 0; at least one worker needs data")
        if num_takers > self.num_samples:
            raise ConfigError(
                f"{num_takers} workers for {self.num_samples} samples: each needs at least one; "
                f"use at most {self.num_samples} workers"
            )
        return weights

    def _check_measured(self) -> None:
        raise ConfigError(
            "shares='measured' changes the workers' shares during the run, but partitions are fixed at its begin; "
            'give shares as numbers, or leave assignment="partitions" out'
        )

    @abstractmethod
    def _divide(self, batch_size: int | Sequence[int], shares: Sequence[float] | None) -> None:
        """Sets `shares` and the edges between workers."""

    @abstractmethod
    def _num_batches(self, partition: int, num_samples: int) -> int:
        """The number of minibatches of a partition if `num_samples` samples of an epoch are left."""

    @abstractmethod
    def _positions(self, ref: BatchRef, num_samples: int) -> tuple[int, int]:
        """[start, stop) of a minibatch in the `num_samples` positions that are left of its epoch's order."""

    def known_until(self, ref: BatchRef) -> int:
        """The number of the first minibatch from `ref` on, in its epoch, whose samples are not known yet."""
        return self.batches_in(ref.partition, ref.epoch)

    @override
    def batches_per_epoch(self, partition: int) -> int:
        return self._num_batches(partition, self.num_samples)

    @override
    def batches_in(self, partition: int, epoch: int) -> int:
        return 0 if epoch < self.progress.epochs else self._num_batches(partition, self._num_left(epoch))

    def ids(self, ref: BatchRef) -> Ids:
        """The sample ids of a minibatch, in order: (size,), a copy. Raises InternalError for an unknown minibatch."""
        start, stop = self._known(ref)
        return self._left_of(ref.epoch)[start:stop].copy()

    def size(self, ref: BatchRef) -> int:
        """See `BatchPlan`. Does not compute the order of the epoch."""
        start, stop = self._known(ref)
        return stop - start

    def likely_size(self, ref: BatchRef) -> int:
        """See `BatchPlan`."""
        return self.size(ref)

    def runs(self, ref: BatchRef) -> list[Run]:
        """The positions of a minibatch in the order of its whole epoch."""
        start, stop = self._known(ref)
        out, before = [], 0
        for first, end in self.progress.left(ref.epoch, self.num_samples):
            run = max(first, first + start - before), min(end, first + stop - before)
            before += end - first
            if run[0] < run[1]:
                out.append(run)
        return out

    @override
    def done_with(self, num_epochs: int, refs: Iterable[BatchRef]) -> DataProgress:
        parts = {epoch: list(runs) for epoch, runs in self.progress.parts.items() if epoch >= num_epochs}
        for ref in refs:
            parts.setdefault(ref.epoch, []).extend(self.runs(ref))
        runs = {epoch: merged(positions) for epoch, positions in sorted(parts.items())}
        return DataProgress(num_epochs, {epoch: positions for epoch, positions in runs.items() if positions})

    def _known(self, ref: BatchRef) -> tuple[int, int]:
        inside = ref.epoch >= 0 and 0 <= ref.partition < self.num_partitions
        if not inside or not 0 <= ref.batch < ref.stop <= self.batches_in(ref.partition, ref.epoch):
            raise InternalError(f"{ref} is not a minibatch of {self!r}")
        return self._positions(ref, self._num_left(ref.epoch))

    def _num_left(self, epoch: int) -> int:
        """The number of samples of an epoch that are not done."""
        if epoch >= self.progress.horizon:
            return self.num_samples
        return sum(stop - start for start, stop in self.progress.left(epoch, self.num_samples))

    def _left_of(self, epoch: int) -> Ids:
        """The rest of an epoch's order."""
        if epoch >= self.progress.horizon:
            return self._order(epoch)
        if self._left is None or self._left[0] != epoch:
            order = self._order(epoch)
            parts = [order[start:stop] for start, stop in self.progress.left(epoch, self.num_samples)]
            self._left = epoch, np.concatenate([order[:0], *parts])
        return self._left[1]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.num_samples} samples, batch sizes {self.batch_sizes}, "
            f"shares {tuple(self.shares)}, seed {self.seed})"
        )


class RoundPlan(EpochPlan):
    """Rounds: in round r the workers together take positions [rB, (r+1)B).

    B = Σ `batch_sizes`; worker i takes `batch_sizes[i]` positions, which may be 0. With one `batch_size` and
    `shares`, B is batch_size × workers, divided by shares. All partitions have ceil(num_samples / B) rounds in an
    epoch. The last round may be short: it is divided in the same proportions, rounded down or up, so that some
    workers may get nothing. `shares[i]` is the size of worker i's full minibatch before any `reassign`.
    """

    KEPT = ("_begins", "_edges", "_decided")
    """See `coordinator.durable`: what `reassign` changes."""

    def _check_measured(self) -> None:
        total = sum(self.batch_sizes)
        if total < self.num_partitions:
            raise ConfigError(
                f"shares='measured': a round has {total} samples for {self.num_partitions} workers; expected at "
                "least one each, since the speed of a worker without samples cannot be measured: use a larger "
                "batch_size"
            )

    def _divide(self, batch_size: int | Sequence[int], shares: Sequence[float] | None) -> None:
        if shares is not None:
            if isinstance(batch_size, Sequence):
                raise ConfigError(
                    "a synchronous round takes a batch size per worker, or one batch size and shares; "
                    "got both lists: leave out shares"
                )
            self.batch_sizes = _sizes(_cut(sum(self.batch_sizes), self._weights))
        self.shares = self.batch_sizes
        self._begins = [(0, 0)]  # (epoch, batch) from which on these edges hold
        self._edges: list[Sequence[int]] = [(0, *accumulate(self.batch_sizes))]
        self._decided: tuple[int, int] | None = None  # (epoch, batch) up to which they hold; None for ever

    def reassign(self, epoch: int, batch: int, sizes: Sequence[int], *, until: int | None = None) -> None:
        """Divides the B positions of a round and of all later ones in another way.

        All nodes must make the same calls before they ask for such a round.

        Args:
            epoch, batch: the round, not before the one of an earlier call.
            sizes: samples of each worker, Σ = B.
            until: the first round of that epoch for which this is not decided yet; None if there is none.

        Raises:
            InternalError: another number of workers or of samples, or an earlier round.
        """
        if len(sizes) != self.num_partitions or sum(sizes) != self._edges[-1][-1] or min(sizes) < 0:
            raise InternalError(f"a round of {self!r} cannot be divided into {tuple(sizes)}")
        if (epoch, batch) < self._begins[-1]:
            raise InternalError(f"shares from round {batch} of epoch {epoch} come after {self._begins[-1]}")
        edges = (0, *accumulate(sizes))
        self._decided = None if until is None else (epoch, until)
        if (epoch, batch) == self._begins[-1]:
            self._edges[-1] = edges
        elif edges != self._edges[-1]:
            self._begins.append((epoch, batch))
            self._edges.append(edges)

    def sizes(self, epoch: int, batch: int) -> tuple[int, ...]:
        """The number of samples of each worker in a full round."""
        return _sizes(self._edges_at(epoch, batch))

    @override
    def known_until(self, ref: BatchRef) -> int:
        total = self.batches_in(ref.partition, ref.epoch)
        if self._decided is None or ref.epoch < self._decided[0]:
            return total
        return min(total, self._decided[1]) if ref.epoch == self._decided[0] else ref.batch

    def _edges_at(self, epoch: int, batch: int) -> Sequence[int]:
        return self._edges[bisect.bisect_right(self._begins, (epoch, batch)) - 1]

    def _num_batches(self, partition: int, num_samples: int) -> int:
        """The number of rounds, which is the same for all partitions, also for those without a share."""
        whole, left = divmod(num_samples, self._edges[0][-1])
        return whole + bool(left and not self._drop_last)

    def _positions(self, ref: BatchRef, num_samples: int) -> tuple[int, int]:
        edges = self._edges_at(ref.epoch, ref.batch)
        round_samples = edges[-1]
        first = ref.batch * round_samples
        if first + round_samples > num_samples:
            edges = _cut(num_samples - first, _sizes(edges))
        return first + edges[ref.partition], first + edges[ref.partition + 1]


class PartitionPlan(EpochPlan):
    """Partitions: the order of each epoch is divided into one run for each worker, and these into minibatches.

    A run is as long as the worker's share of `num_samples`, rounded down or up; a worker with 0 samples has no
    minibatches. The last minibatch of a run may be short. `shares[i]` is the number of samples of partition i in each
    epoch.
    """

    def _divide(self, batch_size: int | Sequence[int], shares: Sequence[float] | None) -> None:
        self._edges = {self.num_samples: _cut(self.num_samples, self._weights)}
        self.shares = _sizes(self._edges[self.num_samples])
        for rank, (samples, size) in enumerate(zip(self.shares, self.batch_sizes, strict=True)):
            if samples and not size:
                raise ConfigError(
                    f"worker {rank} has a share of {samples} samples and batch size 0; "
                    "give it a batch size of at least 1, or share 0"
                )

    def _num_batches(self, partition: int, num_samples: int) -> int:
        """See `EpochPlan`; 0 for a partition without a share."""
        start, stop = self._share(partition, num_samples)
        size = self.batch_sizes[partition]
        whole, left = divmod(stop - start, size) if size else (0, 0)
        return whole + bool(left and not self._drop_last)

    def _positions(self, ref: BatchRef, num_samples: int) -> tuple[int, int]:
        first, end = self._share(ref.partition, num_samples)
        size = self.batch_sizes[ref.partition]
        start = first + ref.batch * size
        return start, min(start + size, end)

    def _share(self, partition: int, num_samples: int) -> Run:
        if num_samples not in self._edges:
            self._edges[num_samples] = _cut(num_samples, self._weights)
        edges = self._edges[num_samples]
        return edges[partition], edges[partition + 1]


@functools.lru_cache(maxsize=256)  # a thousand workers have one and the same
def _as_written(share: str) -> Fraction:
    """A share as it was written: 0.1 is meant as one tenth, and ten samples of it are one."""
    return Fraction(share)


def _cut(count: int, weights: Sequence[int | Fraction]) -> tuple[int, ...]:
    """The edges that divide [0, count) into runs proportional to the weights; one more than there are weights.

    edgeᵢ = ceil(count · (w₀ + … + wᵢ₋₁) / Σw), computed exactly, so that all nodes agree. The length of each run
    differs from its quota by less than one, and is 0 if the weight is 0.
    """
    total = sum(weights)
    return tuple(int(-(-count * before // total)) for before in accumulate(weights, initial=0))


def _sizes(edges: Sequence[int]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in pairwise(edges))


def _whole(what: str, value: int, *, least: int) -> int:
    """`value` as an int. Raises ConfigError unless it is a whole number of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{what} must be a whole number, got {value!r}") from None
    if number < least:
        raise ConfigError(f"{what} must be at least {least}, got {number}")
    return number


def _batch_sizes(batch_size: int | Sequence[int], num_partitions: int) -> tuple[int, ...]:
    """The batch size of each worker; in a list some may be 0, but not all."""
    if not isinstance(batch_size, Sequence):
        return (_whole("batch_size", batch_size, least=1),) * num_partitions
    if len(batch_size) != num_partitions:
        raise ConfigError(
            f"batch_size has {len(batch_size)} entries for {num_partitions} workers; "
            "give one number, or one per worker"
        )
    sizes = tuple(_whole(f"batch_size of worker {i}", size, least=0) for i, size in enumerate(batch_size))
    if not any(sizes):
        raise ConfigError(f"batch_size is 0 for all {num_partitions} workers; at least one needs samples")
    return sizes


# ---- joined minibatches ------------------------------------------------------------------
# Joined minibatches: a step computes k minibatches one after the other (gradient accumulation).
#
# A joined minibatch has a name, a size and a receipt like any other, so code that counts steps, rounds or receipts
# treats it alike. Its parts are k successive minibatches of the underlying plan.


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

    @override
    def batches_per_epoch(self, partition: int) -> int:
        return -(-self.plan.batches_per_epoch(partition) // self.k)

    @override
    def batches_in(self, partition: int, epoch: int) -> int:
        return -(-self.plan.batches_in(partition, epoch) // self.k)

    @override
    def done_with(self, num_epochs: int, refs: Iterable[BatchRef]) -> DataProgress:
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
