"""The order of samples and its cut: every sample once an epoch, rounds equal to the joined batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradstream.data import BatchRef, EpochPlan, PartitionPlan, RoundPlan
from gradstream.data.base import BatchPlan, Ids
from gradstream.data.plan import epoch_order
from gradstream.errors import ConfigError, InternalError

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)
SHARES = st.one_of(st.integers(0, 20), st.floats(0, 20, allow_subnormal=False))


def all_ids(plan: EpochPlan, epoch: int) -> list[Ids]:
    refs = [
        BatchRef(epoch, partition, batch)
        for partition in range(len(plan.shares))
        for batch in range(plan.batches_per_epoch(partition))
    ]
    assert [plan.size(ref) for ref in refs] == [len(plan.ids(ref)) for ref in refs]
    return [plan.ids(ref) for ref in refs]


@given(st.integers(6, 200), SIZES, st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_rounds_give_each_sample_once_and_join_to_slices(
    num_samples: int, sizes: list[int], seed: int, epoch: int
) -> None:
    plan = RoundPlan(num_samples, sizes, len(sizes), seed=seed)
    assert sorted(np.concatenate(all_ids(plan, epoch))) == list(range(num_samples))
    one_node = RoundPlan(num_samples, sum(sizes), 1, seed=seed)
    rounds = {plan.batches_per_epoch(rank) for rank in range(len(sizes))}
    assert rounds == {one_node.batches_per_epoch(0)}
    for batch in range(rounds.pop()):
        parts = [plan.ids(BatchRef(epoch, rank, batch)) for rank in range(len(sizes))]
        joined = one_node.ids(BatchRef(epoch, 0, batch))
        np.testing.assert_array_equal(np.concatenate(parts), joined)
        for part, size in zip(parts, sizes, strict=True):
            assert abs(len(part) - len(joined) * size / sum(sizes)) < 1


@given(
    st.integers(6, 200),
    st.integers(1, 9),
    st.lists(SHARES, min_size=1, max_size=6).filter(any),
    st.integers(0, 1000),
)
def test_partitions_give_each_sample_once(
    num_samples: int, batch_size: int, shares: list[float], epoch: int
) -> None:
    plan = PartitionPlan(num_samples, batch_size, len(shares), seed=5, shares=shares)
    ids = all_ids(plan, epoch)
    np.testing.assert_array_equal(np.concatenate(ids), epoch_order(num_samples, 5, epoch))
    assert sum(plan.shares) == num_samples
    for samples, share in zip(plan.shares, shares, strict=True):
        assert abs(samples - num_samples * share / sum(shares)) < 1 + 1e-9
        assert share or not samples
    for rank, samples in enumerate(plan.shares):
        sizes = [plan.size(BatchRef(epoch, rank, b)) for b in range(plan.batches_per_epoch(rank))]
        assert sum(sizes) == samples
        assert all(size == batch_size for size in sizes[:-1])


def test_order_is_pinned() -> None:
    """These very numbers, on every machine and every numpy: a run can be resumed elsewhere."""
    assert epoch_order(10, 7, 0).tolist() == [8, 4, 1, 6, 3, 2, 7, 5, 9, 0]
    assert epoch_order(10, 7, 1).tolist() == [3, 9, 1, 6, 2, 5, 4, 8, 0, 7]


def test_order_depends_on_seed_and_epoch_and_nothing_else() -> None:
    first = epoch_order(100, 1, 2).tolist()
    for other in ((1, 3), (2, 2), (2, 1), (0, 0)):
        assert epoch_order(100, *other).tolist() != first
    assert epoch_order(100, 1, 2).tolist() == first


def test_positions_are_uniform() -> None:
    """Sample 0 lands in each of 10 places about equally often (χ² with 9 degrees below 1 in 10⁴)."""
    places = [epoch_order(10, 3, epoch).tolist().index(0) for epoch in range(2000)]
    counts = np.bincount(places, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 33.7


def test_ids_are_the_callers_to_keep() -> None:
    plan = RoundPlan(10, 5, 2)
    ids = plan.ids(BatchRef(0, 0, 0))
    before = ids.copy()
    ids[:] = 0
    np.testing.assert_array_equal(plan.ids(BatchRef(0, 0, 0)), before)


def test_short_last_round_is_divided_in_proportion() -> None:
    plan = RoundPlan(40, (7, 1, 0, 8), 4)
    assert [plan.size(BatchRef(0, rank, 2)) for rank in range(4)] == [4, 0, 0, 4]


def test_shares_divide_a_round() -> None:
    assert RoundPlan(100, 10, 3, shares=(0.5, 0.5, 0)).shares == (15, 15, 0)
    assert PartitionPlan(10, 2, 3, shares=(0.1, 0.2, 0.7)).shares == (1, 2, 7)
    assert PartitionPlan(16, (7, 1, 0, 8), 4).shares == (7, 1, 0, 8)


def test_is_a_plan() -> None:
    plans: list[BatchPlan] = [RoundPlan(4, 1, 2), PartitionPlan(4, 1, 2)]
    assert [plan.size(BatchRef(0, 1, 0)) for plan in plans] == [1, 1]


@pytest.mark.parametrize("kind", [RoundPlan, PartitionPlan])
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 1, 1), {}, "num_samples must be at least 1, got 0"),
        ((10, 0, 2), {}, "batch_size must be at least 1, got 0"),
        ((10, 2.5, 2), {}, "batch_size must be a whole number, got 2.5"),
        ((10, 1, 0), {}, "number of workers must be at least 1, got 0"),
        ((10, (1, 2), 3), {}, "batch_size has 2 entries for 3 workers"),
        ((10, (1, -2), 2), {}, "batch_size of worker 1 must be at least 0, got -2"),
        ((10, (0, 0), 2), {}, "batch_size is 0 for all 2 workers"),
        ((3, 1, 4), {}, "4 workers for 3 samples"),
        ((10, 1, 2), {"shares": (1, -1)}, "share of worker 1 is -1"),
        ((10, 1, 2), {"shares": (1, float("nan"))}, "share of worker 1 is nan"),
        ((10, 1, 2), {"shares": (0, 0)}, "all 2 shares are 0"),
        ((10, 1, 2), {"shares": (1,)}, "shares has 1 entries for 2 workers"),
        ((10, 1, 2), {"seed": -1}, "seed must be at least 0"),
        ((10, 1, 2), {"seed": 2**64}, "seed must be below"),
    ],
)
def test_errors(
    kind: type[EpochPlan], arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(*arguments, **options)


def test_errors_of_one_kind() -> None:
    with pytest.raises(ConfigError, match="leave out shares"):
        RoundPlan(10, (1, 2), 2, shares=(1, 2))
    with pytest.raises(ConfigError, match="worker 1 has a share of 5 samples and batch size 0"):
        PartitionPlan(10, (1, 0), 2, shares=(1, 1))


@pytest.mark.parametrize(
    "ref", [BatchRef(-1, 0, 0), BatchRef(0, 2, 0), BatchRef(0, 0, 5), BatchRef(0, 0, -1)]
)
def test_unknown_batches(ref: BatchRef) -> None:
    plan = PartitionPlan(10, 1, 2)
    with pytest.raises(InternalError, match="not a minibatch"):
        plan.ids(ref)
    with pytest.raises(InternalError, match="not a minibatch"):
        plan.size(ref)


@pytest.mark.parametrize(
    ("kind", "batches"),
    [(RoundPlan, [[0, 1], [4, 5], [2, 3], [6, 7]]), (PartitionPlan, [[0, 1], [2, 3], [5, 6], [7, 8]])],
)
def test_an_order_of_ones_own_and_nothing_short(kind: type[EpochPlan], batches: list[list[int]]) -> None:
    plan = kind(10, 2, 2, order=lambda epoch: np.arange(10) + 100 * epoch, drop_last=True)
    refs = [BatchRef(1, rank, batch) for rank in (0, 1) for batch in range(plan.batches_per_epoch(rank))]
    assert [(plan.ids(ref) - 100).tolist() for ref in refs] == batches
    with pytest.raises(ConfigError, match="drop_last drops all 10 samples"):
        kind(10, 6, 2, drop_last=True)
