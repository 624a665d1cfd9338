"""Makes the plan and the feed of any data set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gradstream.data.base import BatchPlan, BatchRef, Dataset, Feed, Partitioning, PartitionSpec
from gradstream.data.plan import EpochPlan, Order, PartitionPlan, RoundPlan
from gradstream.errors import ConfigError, InternalError
from gradstream.model.base import Batch

# ---- queue plan --------------------------------------------------------------------------
# The plan with one queue of minibatches for all workers, from which each takes the next ones when it needs them.
#
#     epoch's order   o₀ o₁ o₂ …            a permutation, a pure function of (seed, epoch)
#     unit u          o[uU : (u+1)U]        U samples
#     minibatch       count units in a row  worker i takes sizes[i] of them, so sizes[i]·U samples
#
# The name of a minibatch determines its samples. The coordinator decides during the run which worker takes it
# (`coordinator.assignment`), so that a fast worker takes more of each epoch, as in guided self-scheduling of loops
# (Polychronopoulos and Kuck, 1987).
#
# If all minibatches have the same size, a unit is a minibatch.

FINENESS = 64
"""Units of a minibatch if sizes follow the speed of the workers; sizes are then exact to about 2 %."""


class QueuePlan(EpochPlan):
    """Queue: one sequence of minibatches for all workers. See `EpochPlan` for the arguments.

    Attributes:
        unit: samples of a unit.
        sizes: units of each worker's minibatch; 0 for a worker that takes none.
        measured: whether sizes follow the speed of the workers after the begin of the run.
    """

    def _check_measured(self) -> None:
        total = sum(self.batch_sizes)
        if total < self.num_workers:
            raise ConfigError(
                f"shares='measured': the minibatches of {self.num_workers} workers have {total} samples together; "
                "expected at least one each, since the speed of a worker without samples cannot be measured: use "
                "a larger batch_size"
            )

    def _divide(self, batch_size: int | Sequence[int], shares: Sequence[float] | None) -> None:
        if shares is not None:
            raise ConfigError(
                f"shares={list(shares)}: workers take minibatches from one queue when they need them, so a fast "
                'worker takes more, and there are no shares: leave shares out, or set assignment="partitions", which '
                "gives each worker a partition of its share"
            )
        common = math.gcd(*self.batch_sizes)
        finest = max(1, common // FINENESS)
        self.unit = common
        if self.measured and self.num_workers > 1:
            self.unit = max(size for size in range(1, finest + 1) if common % size == 0)
        self.sizes = tuple(size // self.unit for size in self.batch_sizes)
        self.shares = self.batch_sizes
        self.num_partitions, self.per_step = 1, sum(self.sizes)

    def _num_batches(self, partition: int, num_samples: int) -> int:
        if self._drop_last:
            num_samples -= num_samples % max(self.batch_sizes)
        return -(-num_samples // self.unit)

    def _positions(self, ref: BatchRef, num_samples: int) -> tuple[int, int]:
        return ref.batch * self.unit, min(ref.stop * self.unit, num_samples)


# ---- feed --------------------------------------------------------------------------------


def plan_of(data: Dataset, spec: PartitionSpec) -> BatchPlan:
    """The plan by which a run divides a data set. Raises ConfigError if the numbers do not fit."""
    own = getattr(data, "plan", None)
    if own is not None:
        plan: BatchPlan = own(spec)
        return plan
    if data.num_samples is None:
        raise ConfigError(
            f"data set {data.name!r} has num_samples=None and no plan(); expected a number of samples, or a plan()"
        )
    return plan_samples(data.num_samples, spec)


def plan_samples(
    num_samples: int, spec: PartitionSpec, *, order: Order | None = None, drop_last: bool = False
) -> EpochPlan:
    """The plan of a data set whose samples have ids."""
    return _KINDS[spec.partitioning](
        num_samples,
        spec.batch_size,
        spec.workers,
        seed=spec.seed,
        shares=spec.shares,
        order=order,
        drop_last=drop_last,
        progress=spec.progress,
    )


def feed_of(data: Dataset, plan: BatchPlan, rank: int, seed: int) -> Feed:
    """The feed of worker `rank`."""
    own = getattr(data, "feed", None)
    if own is not None:
        feed: Feed = own(plan, rank, seed)
        return feed
    return IdFeed(data, plan)


_KINDS: Mapping[Partitioning, type[EpochPlan]] = {
    "rounds": RoundPlan,
    "queue": QueuePlan,
    "partitions": PartitionPlan,
}


class IdFeed:
    """Reads the samples of a minibatch by their ids, which the plan knows."""

    def __init__(self, data: Dataset, plan: BatchPlan) -> None:
        if not isinstance(plan, EpochPlan):
            raise InternalError(f"{data.name!r} has its own plan, {plan!r}, but no feed() to read it")
        self._data = data
        self._plan = plan

    def read(self, ref: BatchRef) -> Batch:
        """See `Feed`."""
        return self._data.batch(self._plan.ids(ref))

    def read_some(self, ref: BatchRef, start: int, stop: int) -> Batch:
        """Samples [start, stop) of a minibatch, where what a sample becomes does not depend on those before it."""
        return self._data.batch(self._plan.ids(ref)[start:stop])
