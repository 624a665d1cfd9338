"""The ledger: every minibatch ends with one receipt, whoever dies, and memory stays small."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradstream.coordinator.progress import SampleProgress
from gradstream.data import BatchRef, EpochPlan, Ledger, PartitionPlan, QueuePlan, RoundPlan
from gradstream.data.leases import Unassigned
from gradstream.data.stream import StreamPlan
from gradstream.errors import ConfigError, InternalError

KINDS: list[type[EpochPlan]] = [QueuePlan, PartitionPlan]


def refs_of(plan: EpochPlan, epochs: int, partition: int) -> list[BatchRef]:
    batches = plan.batches_per_epoch(partition)
    return [BatchRef(epoch, partition, batch) for epoch in range(epochs) for batch in range(batches)]


def test_a_run_without_losses() -> None:
    plan = PartitionPlan(20, 2, 2, shares=(1, 4))
    ledger = Ledger(plan, epochs=3)
    assert (ledger.batches(0), ledger.samples(0), ledger.num_epochs) == (10, 20, 3)
    for partition in (0, 1):
        for ref in refs_of(plan, 3, partition):
            assert not ledger.finished
            assert ledger.receipt(ref, partition)
            assert not ledger.receipt(ref, partition)
    assert ledger.finished
    assert all(ledger.complete(epoch) and ledger.reassigned(epoch) == 0 for epoch in range(3))
    assert ledger.leases.hand_out(0, 10) == ()


def taken(plan: EpochPlan, refs: Sequence[BatchRef]) -> list[tuple[int, int]]:
    """(epoch, samples) of minibatches."""
    return [(ref.epoch, plan.size(ref) or 0) for ref in refs]


def test_from_a_queue_each_takes_the_next_ones() -> None:
    ledger = Ledger(QueuePlan(9, 2, 2), epochs=2)
    assert ledger.leases.unassigned(0) == Unassigned(epoch=5, run=10)
    assert ledger.leases.hand_out(0, 2) == (BatchRef(0, 0, 0), BatchRef(0, 0, 1))
    assert ledger.leases.hand_out(1, 1) == (BatchRef(0, 0, 2),)
    assert ledger.leases.unassigned(1) == Unassigned(epoch=2, run=7)
    assert ledger.leases.hand_out(1, 9)[1:3] == (BatchRef(0, 0, 4), BatchRef(1, 0, 0))
    assert ledger.leases.unassigned(0) == Unassigned(epoch=0, run=0)
    assert ledger.leases.hand_out(0, 1) == ()
    assert (ledger.leases.in_hand(0), ledger.leases.in_hand(1)) == (2, 8)
    assert ledger.receipt(BatchRef(0, 0, 1), 0)
    assert (ledger.leases.in_hand(0), ledger.num_receipts, ledger.num_samples) == (1, 1, 2)


def test_minibatches_of_a_lost_worker_are_assigned_again_once() -> None:
    ledger = Ledger(QueuePlan(8, 1, 3), epochs=1)
    first, second = ledger.leases.hand_out(1, 3), ledger.leases.hand_out(0, 2)
    assert ledger.receipt(first[1], 1)
    assert (ledger.lost(1), ledger.lost(1)) == (2, 0)
    assert ledger.leases.unassigned(0) == Unassigned(epoch=5, run=5)
    assert ledger.leases.hand_out(1, 9) == ()
    assert ledger.leases.hand_out(2, 3) == (first[0], first[2], BatchRef(0, 0, 5))
    assert ledger.lost(2) == 3  # the taker dies, too
    assert ledger.receipt(first[2], 2)  # was on its way then
    assert ledger.leases.hand_out(0, 9) == (first[0], *(BatchRef(0, 0, batch) for batch in (5, 6, 7)))
    for ref in (*second, first[0], *(BatchRef(0, 0, batch) for batch in (5, 6, 7))):
        assert ledger.receipt(ref, 0)
    assert ledger.finished
    assert ledger.reassigned(0) == 2


def test_minibatches_of_several_sizes_cover_an_epoch() -> None:
    plan = QueuePlan(50, [12, 4], 2)
    assert (plan.unit, plan.sizes, plan.per_step) == (4, (3, 1), 4)
    ledger = Ledger(plan, epochs=2)
    assert ledger.num_planned == 13  # 2 · 50 samples are 6.25 steps of two workers, and a bit
    large = ledger.leases.hand_out(0, 3, size=3)
    small = ledger.leases.hand_out(1, 2, size=1)
    rest = ledger.leases.hand_out(0, 9, size=3)
    assert large == tuple(BatchRef(0, 0, batch, 3) for batch in (0, 3, 6))
    assert small == (BatchRef(0, 0, 9), BatchRef(0, 0, 10))
    assert taken(plan, rest)[:3] == [(0, 6), (1, 12), (1, 12)]
    done = np.concatenate([plan.ids(ref) for ref in (*large, *small, rest[0])])
    assert sorted(done) == list(range(50))
    ledger.lost(0)
    assert ledger.leases.hand_out(1, 2, size=1) == (
        BatchRef(0, 0, 0),
        BatchRef(0, 0, 1),
    )  # in pieces of its own size
    assert ledger.receipt(large[0], 0)  # late: two units of it are with another now
    assert ledger.num_samples == 12
    assert not ledger.receipt(BatchRef(0, 0, 1), 1)
    assert ledger.num_receipts == 1


def test_a_worker_takes_of_its_own_partition_and_then_of_the_fullest_of_that_epoch() -> None:
    ledger = Ledger(PartitionPlan(12, 1, 3), epochs=2)
    assert ledger.leases.hand_out(2, 3) == tuple(BatchRef(0, 2, batch) for batch in range(3))
    ledger.leases.hand_out(1, 1)
    mine = ledger.leases.hand_out(0, 9)
    assert mine == (
        *(BatchRef(0, 0, batch) for batch in range(4)),
        *(BatchRef(0, 1, batch) for batch in range(1, 4)),
        BatchRef(0, 2, 3),
        BatchRef(1, 0, 0),
    )
    for ref in mine:
        assert ledger.receipt(ref, 0)
    assert ledger.reassigned(0) == 0  # nobody had them before


def test_workers_take_over_only_a_lost_workers_stream_before_the_end() -> None:
    plan = StreamPlan((2, 2, 2), rounds=None, endless=False, typical_size=8)
    ledger = Ledger(plan, epochs=2)
    assert ledger.leases.hand_out(0, 3) == (BatchRef(0, 0, 0), BatchRef(0, 0, 1), BatchRef(1, 0, 0))
    ledger.lost(2)
    assert ledger.leases.hand_out(0, 2) == (BatchRef(0, 2, 0), BatchRef(0, 2, 1))
    assert ledger.leases.hand_out(0, 9) == (
        BatchRef(1, 0, 1), BatchRef(1, 2, 0), BatchRef(1, 2, 1),
        *(BatchRef(epoch, 1, batch) for epoch in (0, 1) for batch in (0, 1)),
    )  # fmt: skip


def test_an_epoch_is_complete_when_all_before_it_are() -> None:
    plan = PartitionPlan(4, 1, 2)
    ledger = Ledger(plan, epochs=2)
    for ref in [*refs_of(plan, 2, 0), *refs_of(plan, 2, 1)[1:]]:
        ledger.receipt(ref, ref.partition)
    assert (ledger.missing(0), ledger.missing(1)) == (1, 0)
    assert not ledger.complete(1)
    ledger.receipt(BatchRef(0, 1, 0), 1)
    assert ledger.complete(1)
    assert ledger.finished


def test_steps_end_a_run() -> None:
    ledger = Ledger(PartitionPlan(20, 2, 3, shares=(1, 4, 0)), steps=5)
    assert ledger.num_epochs == 3  # partition 0 has two batches an epoch
    assert [ledger.batches(epoch) for epoch in range(4)] == [7, 2, 1, 0]
    assert [ledger.samples(epoch) for epoch in range(4)] == [14, 4, 2, 0]
    with pytest.raises(InternalError, match="no minibatch of this run"):
        ledger.receipt(BatchRef(0, 1, 5), 1)
    both = Ledger(PartitionPlan(20, 2, 2), epochs=1, steps=9)
    assert both.num_epochs == 1


def test_steps_of_a_queue_are_those_of_each_worker() -> None:
    ledger = Ledger(QueuePlan(20, 2, 3), steps=5)
    assert (ledger.most_begun, ledger.num_planned, ledger.num_epochs) == (15, 15, 2)
    assert len(ledger.leases.hand_out(1, 99)) == 15


def test_batches_without_samples_need_receipts() -> None:
    assert Ledger(RoundPlan(10, (5, 0), 2), epochs=1).missing(0) == 4


def test_data_epochs_that_were_reported_take_no_memory_but_for_what_was_dropped() -> None:
    """The coordinator's store has a row of these counts, which each transaction writes again."""
    ledger = Ledger(PartitionPlan(4, 2, 1), epochs=1000)
    progress = SampleProgress(ledger, 4, None)
    for epoch in range(1000):
        if epoch == 7:
            ledger.refuse(BatchRef(epoch, 0, 1), 2)
        for batch in range(2):
            ledger.receipt(BatchRef(epoch, 0, batch), 0)
        (event,) = progress.completed()
        assert (event.epoch, event.batches, event.dropped) == (epoch, 2, 2 * (epoch == 7))
    assert list(ledger._counts) == [7]
    assert ledger.finished and ledger.dropped == {7: 2}
    assert not ledger.receipt(BatchRef(3, 0, 0), 0)  # it came late, once more
    assert ledger.num_samples == 4 * 1000 - 2 and ledger.progress().epochs == 1000


def test_a_long_run_is_as_small_as_a_short_one() -> None:
    ledger = Ledger(PartitionPlan(10, 1, 2), epochs=10**12)
    ledger.lost(1)
    for epoch in range(100):
        for ref in ledger.leases.hand_out(0, 10):
            ledger.receipt(ref, 0)
        assert ledger.complete(epoch)
    assert not any(sequence.ahead or sequence.returned for sequence in ledger._sequences)
    assert not any(ledger.leases._leased.values())
    assert not ledger.leases._again


@settings(max_examples=150)
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(1, 4), st.sampled_from(KINDS))
def test_any_history_ends_with_every_sample_once(
    rng: random.Random, workers: int, epochs: int, kind: type[EpochPlan]
) -> None:
    """Against a plain set: receipts late and repeated, takers dying, until one worker is left."""
    samples = rng.randint(5, 30)
    sizes = [rng.choice((2, 4)) for _ in range(workers)] if kind is QueuePlan else rng.randint(1, 4)
    plan = kind(samples, sizes, workers)
    ledger = Ledger(plan, epochs=epochs)
    missing = {(epoch, number) for epoch in range(epochs) for number in range(samples)}
    hands: list[list[BatchRef]] = [[] for _ in range(workers)]
    late: list[tuple[BatchRef, int]] = []
    alive = list(range(workers))
    while not ledger.finished:
        rank = rng.choice(alive)
        if len(alive) > 1 and rng.random() < 0.02:
            alive.remove(rank)
            ledger.lost(rank)
        elif not hands[rank]:
            size = rng.choice((1, 2)) if kind is QueuePlan else 1
            hands[rank] += ledger.leases.hand_out(rank, rng.randint(1, 4), size)
        else:
            late.append((hands[rank].pop(0), rank))
        if rng.random() < 0.5:
            rng.shuffle(late)
        # the living's receipts arrive; the dead's may, or are lost with them
        while late and rng.random() < 0.8:
            ref, sender = late.pop()
            told = {(ref.epoch, int(number)) for number in plan.ids(ref)}
            if sender in alive or rng.random() < 0.5:
                assert ledger.receipt(ref, sender) == bool(told & missing)
                missing -= told
            if sender in alive and rng.random() < 0.2:
                assert not ledger.receipt(ref, sender)
        assert ledger.num_samples == epochs * samples - len(missing)
        for epoch in range(epochs):
            assert ledger.complete(epoch) == (not any(its <= epoch for its, _ in missing))
    assert not missing


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "give epochs or steps"),
        ({"epochs": 0}, "epochs=0: expected at least 1"),
        ({"steps": 0}, "steps=0: expected at least 1"),
    ],
)
def test_errors(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ledger(PartitionPlan(4, 1, 2), **limits)


@pytest.mark.parametrize("ref", [BatchRef(2, 0, 0), BatchRef(0, 2, 0), BatchRef(0, 0, 2), BatchRef(-1, 0, 0)])
def test_unknown_batches_and_ranks(ref: BatchRef) -> None:
    ledger = Ledger(PartitionPlan(4, 1, 2), epochs=2)
    with pytest.raises(InternalError, match="no minibatch of this run"):
        ledger.receipt(ref, 0)
    with pytest.raises(InternalError, match="the ledger knows, 0 to 1"):
        ledger.lost(2)
