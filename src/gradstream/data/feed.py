"""Makes the plan and the feed of any data set."""

from __future__ import annotations

from collections.abc import Mapping

from gradstream.data.base import BatchPlan, BatchRef, Dataset, Feed, Partitioning, PartitionSpec
from gradstream.data.plan import EpochPlan, Order, PartitionPlan, RoundPlan
from gradstream.data.queue_plan import QueuePlan
from gradstream.errors import ConfigError, InternalError
from gradstream.model.base import Batch


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
