"""The order of samples in each epoch, and two ways of cutting it among workers beforehand.

    epoch's order   o₀ o₁ o₂ …                    a permutation, a pure function of (seed, epoch)
    RoundPlan       round r = o[rB : (r+1)B], B = Σ bᵢ; worker i takes its bᵢ of it, in rank order
    PartitionPlan   partition i = one run of the order, as long as its share; cut into minibatches

A third one cuts it as workers ask: `queue_plan.py`. All give every sample to exactly one minibatch of every
epoch. A round of `RoundPlan`, joined over its workers, is the minibatch that one node with batch size B would
take. How many of it each worker takes may change from one round to the next (`reassign`); B does not.

A plan may begin in the middle (`DataProgress`, from a checkpoint): what is left of an epoch's order is then
cut as a whole epoch's is. With the batch sizes of before, the rounds that are left are those of before.
"""

from __future__ import annotations

import bisect
import functools
import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from gradstream.data.base import BatchRef, Ids
from gradstream.data.batch_sequence import BatchSequence
from gradstream.data.progress import DataProgress, Run, merged
from gradstream.data.shares import MEASURED
from gradstream.errors import ConfigError, InternalError

__all__ = ["EpochPlan", "Order", "PartitionPlan", "RoundPlan", "epoch_order"]

Order = Callable[[int], Ids]
"""Data epoch to the order of its samples: as many ids as the plan has positions, a pure function."""


@functools.lru_cache(maxsize=2)  # workers of one process are in the same epoch, or one apart
def epoch_order(num_samples: int, seed: int, epoch: int) -> Ids:
    """A permutation of 0 … num_samples-1: shape (num_samples,), int64, read-only.

    The stable order of as many raw words of Philox under the key (seed, epoch). Raw words are
    the part of numpy's generators that never changes between versions (its `permutation` may),
    so machines with different numpys agree.

    Reference: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(num_samples), kind="stable")
    order.flags.writeable = False
    return order


class EpochPlan(BatchSequence):
    """Who goes through which sample when: what `RoundPlan` and `PartitionPlan` have in common.

    Args:
        num_samples: size of the data set.
        batch_size: samples a worker takes at a time: one number for all, or one per worker.
        num_workers: how many workers the data is planned for.
        seed: of the order of samples, in [0, 2⁶⁴).
        shares: relative amounts of data, one per worker, 0 allowed; as the batch sizes if None. "measured"
            begins with the batch sizes, and leaves it to `RoundPlan.reassign` to change them.
        order: of the samples in each epoch; None takes `epoch_order` under `seed`.
        drop_last: leave out what does not fill a minibatch (of all workers together, in rounds).
        progress: samples that are in the model already, and in no minibatch of this plan.

    Raises:
        ConfigError: a number out of its range, lists of the wrong length, more workers than
            samples. The message says which.
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
        self._left: tuple[int, Ids] | None = None  # of the begun epoch that was looked at last
        self._divide(batch_size, shares)
        if not any(map(self.batches_per_epoch, range(self.num_partitions))):
            raise ConfigError(
                f"drop_last leaves nothing of {self.num_samples} samples: none of the {self.num_workers} "
                f"workers fills a minibatch of {self.batch_sizes}; use smaller ones, or fewer workers"
            )

    def _check_shares(self, shares: Sequence[float]) -> tuple[Fraction, ...]:
        if len(shares) != self.num_partitions:
            raise ConfigError(
                f"shares has {len(shares)} entries for {self.num_partitions} workers; give one per worker"
            )
        for rank, share in enumerate(shares):
            if not (math.isfinite(share) and share >= 0):
                raise ConfigError(f"share of worker {rank} is {share}; it must be finite and at least 0")
        # through str: 0.1 is meant as one tenth, and ten samples of it are one
        weights = tuple(Fraction(str(share)) for share in shares)
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
            "shares='measured': each worker has a partition of its own, which stays as it is; give numbers, "
            'or leave assignment="partitions" out'
        )

    @abstractmethod
    def _divide(self, batch_size: int | Sequence[int], shares: Sequence[float] | None) -> None:
        """Sets `shares` and the edges between workers."""

    @abstractmethod
    def _num_batches(self, partition: int, num_samples: int) -> int:
        """How many minibatches a partition has where `num_samples` of an epoch are left."""

    @abstractmethod
    def _positions(self, ref: BatchRef, num_samples: int) -> tuple[int, int]:
        """[start, stop) of a minibatch in what is left of its epoch's order: `num_samples`."""

    def known_until(self, ref: BatchRef) -> int:
        """The first minibatch of its partition and epoch, from `ref` on, whose samples are not known yet."""
        return self.batches_in(ref.partition, ref.epoch)

    def batches_per_epoch(self, partition: int) -> int:
        """How many minibatches a partition has in each whole epoch."""
        return self._num_batches(partition, self.num_samples)

    def batches_in(self, partition: int, epoch: int) -> int:
        """How many it has in this epoch: fewer, or none, where some of it is done."""
        return 0 if epoch < self.progress.epochs else self._num_batches(partition, self._num_left(epoch))

    def ids(self, ref: BatchRef) -> Ids:
        """Sample ids of a minibatch, in order: (size,), a copy. Raises InternalError for an unknown one."""
        start, stop = self._known(ref)
        return self._left_of(ref.epoch)[start:stop].copy()

    def size(self, ref: BatchRef) -> int:
        """How many samples a minibatch has, without computing the epoch's order."""
        start, stop = self._known(ref)
        return stop - start

    def likely_size(self, ref: BatchRef) -> int:
        """The same."""
        return self.size(ref)

    def runs(self, ref: BatchRef) -> list[Run]:
        """The positions of a minibatch in its whole epoch's order."""
        start, stop = self._known(ref)
        out, before = [], 0
        for first, end in self.progress.left(ref.epoch, self.num_samples):
            run = max(first, first + start - before), min(end, first + stop - before)
            before += end - first
            if run[0] < run[1]:
                out.append(run)
        return out

    def done_with(self, num_epochs: int, refs: Iterable[BatchRef]) -> DataProgress:
        """What is in the model, sample by sample."""
        parts = {epoch: list(runs) for epoch, runs in self.progress.parts.items() if epoch >= num_epochs}
        for ref in refs:
            parts.setdefault(ref.epoch, []).extend(self.runs(ref))
        runs = {epoch: merged(found) for epoch, found in sorted(parts.items())}
        return DataProgress(num_epochs, {epoch: found for epoch, found in runs.items() if found})

    def _known(self, ref: BatchRef) -> tuple[int, int]:
        inside = ref.epoch >= 0 and 0 <= ref.partition < self.num_partitions
        if not inside or not 0 <= ref.batch < ref.stop <= self.batches_in(ref.partition, ref.epoch):
            raise InternalError(f"{ref} is not a minibatch of {self!r}")
        return self._positions(ref, self._num_left(ref.epoch))

    def _num_left(self, epoch: int) -> int:
        """How many samples of an epoch are not done."""
        if epoch >= self.progress.horizon:
            return self.num_samples
        return sum(stop - start for start, stop in self.progress.left(epoch, self.num_samples))

    def _left_of(self, epoch: int) -> Ids:
        """What is left of an epoch's order."""
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
    """Synchronous: in round r all workers together go through positions [rB, (r+1)B).

    B = Σ `batch_sizes`; worker i takes `batch_sizes[i]` positions, which may be 0. With one
    `batch_size` and `shares`, B is batch_size × workers, divided by shares. All partitions have
    ceil(num_samples / B) rounds an epoch. The last may be short: it is divided in the same
    proportions, each worker getting its part rounded down or up; some may get nothing.
    `shares[i]` is the size of worker i's full minibatch, before `reassign` says otherwise.
    """

    def _check_measured(self) -> None:
        total = sum(self.batch_sizes)
        if total < self.num_partitions:
            raise ConfigError(
                f"shares='measured': a round has {total} samples for {self.num_partitions} workers; each "
                "needs at least one, or it cannot be measured: use a larger batch_size"
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
        self._begins = [(0, 0)]  # (epoch, batch) from which on ...
        self._edges: list[Sequence[int]] = [(0, *accumulate(self.batch_sizes))]  # ... rounds are cut there
        self._decided: tuple[int, int] | None = None  # (epoch, batch) up to which that is; None for all

    def reassign(self, epoch: int, batch: int, sizes: Sequence[int], *, until: int | None = None) -> None:
        """From a round on, its B positions are divided otherwise.

        All nodes that look at a round must have been told the same before they do.

        Args:
            epoch, batch: the round; not before one that was told earlier.
            sizes: samples of each worker, Σ = B.
            until: the first round of that epoch for which this is not decided yet; None for no such.

        Raises:
            InternalError: another number of workers or of samples, or an earlier round.
        """
        if len(sizes) != self.num_partitions or sum(sizes) != self._edges[-1][-1] or min(sizes) < 0:
            raise InternalError(f"a round of {self!r} cannot be divided into {tuple(sizes)}")
        if (epoch, batch) < self._begins[-1]:
            raise InternalError(f"shares from round {batch} of epoch {epoch} come behind {self._begins[-1]}")
        edges = (0, *accumulate(sizes))
        self._decided = None if until is None else (epoch, until)
        if (epoch, batch) == self._begins[-1]:
            self._edges[-1] = edges
        elif edges != self._edges[-1]:
            self._begins.append((epoch, batch))
            self._edges.append(edges)

    def sizes(self, epoch: int, batch: int) -> tuple[int, ...]:
        """How many samples each worker takes of a whole round there."""
        return _sizes(self._edges_at(epoch, batch))

    def known_until(self, ref: BatchRef) -> int:
        """See `EpochPlan`."""
        total = self.batches_in(ref.partition, ref.epoch)
        if self._decided is None or ref.epoch < self._decided[0]:
            return total
        return min(total, self._decided[1]) if ref.epoch == self._decided[0] else ref.batch

    def _edges_at(self, epoch: int, batch: int) -> Sequence[int]:
        return self._edges[bisect.bisect_right(self._begins, (epoch, batch)) - 1]

    def _num_batches(self, partition: int, num_samples: int) -> int:
        """Rounds: the same for all partitions, those without a share included."""
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
    """Asynchronous: each epoch's order is cut into one run per worker, and those into minibatches.

    A run is as long as the worker's share of `num_samples`, rounded down or up (where that is 0,
    the worker has no minibatches); the last minibatch of a run may be short. `shares[i]` is the
    number of samples of partition i in each epoch.
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
        """0 for a partition without a share."""
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


def _cut(count: int, weights: Sequence[int | Fraction]) -> tuple[int, ...]:
    """Edges, one more than weights, cutting [0, count) into runs proportional to the weights.

    edgeᵢ = ceil(count · (w₀ + … + wᵢ₋₁) / Σw): exact, so that all nodes agree; each run is
    within one of its quota, and empty where the weight is 0.
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
    """One batch size per worker; 0 is allowed in a list that is not all zeros."""
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
