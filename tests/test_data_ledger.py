"""The ledger: every minibatch ends with one receipt, whoever dies, and memory stays small."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradstream.data import BatchRef, EpochPlan, Ledger, PartitionPlan, RoundPlan
from gradstream.errors import ConfigError, InternalError


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
    assert ledger.orphans(2, 10, 0) == ()


def test_a_lost_workers_batches_go_to_who_asks() -> None:
    plan = PartitionPlan(8, 1, 2)
    ledger = Ledger(plan, epochs=2)
    ledger.receipt(BatchRef(0, 1, 0), 1)
    ledger.receipt(BatchRef(0, 1, 2), 1)
    assert ledger.orphans(1, 9, 0) == ()
    assert ledger.lost(1) == 6
    assert ledger.lost(1) == 0
    assert ledger.orphans(0, 9, 0) == (BatchRef(0, 1, 1), BatchRef(0, 1, 3))
    assert ledger.orphans(0, 9, 0) == ()
    assert ledger.orphans(1, 3, 0) == tuple(BatchRef(1, 1, batch) for batch in range(3))
    assert ledger.orphans(1, 3, 1) == ()  # a dead worker is handed nothing
    assert ledger.receipt(BatchRef(0, 1, 3), 0)
    assert (ledger.missing(0), ledger.reassigned(0)) == (5, 1)


def test_a_taker_dies_too_and_its_late_receipt_counts() -> None:
    ledger = Ledger(PartitionPlan(6, 1, 3), epochs=1)
    assert ledger.lost(2) == 2
    assert ledger.orphans(0, 9, 1) == (BatchRef(0, 2, 0), BatchRef(0, 2, 1))
    assert ledger.lost(1) == 2 + 2
    assert ledger.receipt(BatchRef(0, 2, 0), 1)  # was on its way when worker 1 died
    assert ledger.orphans(0, 9, 0) == (BatchRef(0, 1, 0), BatchRef(0, 1, 1), BatchRef(0, 2, 1))


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


def test_orphans_of_earlier_epochs_come_first() -> None:
    ledger = Ledger(PartitionPlan(3, 1, 3), epochs=3)
    for ref in (BatchRef(0, 1, 0), BatchRef(1, 1, 0)):
        ledger.receipt(ref, 1)
    ledger.lost(1)
    ledger.lost(2)
    assert ledger.orphans(2, 2, 0) == (BatchRef(0, 2, 0), BatchRef(1, 2, 0))
    assert ledger.orphans(2, 9, 0) == (BatchRef(2, 1, 0), BatchRef(2, 2, 0))


def test_steps_end_a_run() -> None:
    ledger = Ledger(PartitionPlan(20, 2, 3, shares=(1, 4, 0)), max_batches_per_partition=5)
    assert ledger.num_epochs == 3  # partition 0 has two batches an epoch
    assert [ledger.batches(epoch) for epoch in range(4)] == [7, 2, 1, 0]
    assert [ledger.samples(epoch) for epoch in range(4)] == [14, 4, 2, 0]
    with pytest.raises(InternalError, match="no minibatch of this run"):
        ledger.receipt(BatchRef(0, 1, 5), 1)
    both = Ledger(PartitionPlan(20, 2, 2), epochs=1, max_batches_per_partition=9)
    assert both.num_epochs == 1


def test_batches_without_samples_need_receipts() -> None:
    assert Ledger(RoundPlan(10, (5, 0), 2), epochs=1).missing(0) == 4


def test_a_long_run_is_as_small_as_a_short_one() -> None:
    ledger = Ledger(PartitionPlan(10, 1, 2), epochs=10**12)
    assert ledger.lost(1) == 5 * 10**12
    for epoch in range(100):
        for batch in range(5):
            ledger.receipt(BatchRef(epoch, 0, batch), 0)
        for ref in ledger.orphans(epoch, 5, 0):
            ledger.receipt(ref, 0)
        assert ledger.complete(epoch)
    assert not any(line.ahead or line.returned for line in ledger._partitions)
    assert not ledger._holder


@settings(max_examples=150)
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_any_history_ends_with_every_batch_once(
    rng: random.Random, workers: int, epochs: int, rounds: bool
) -> None:
    """Against a plain set: receipts late and repeated, takers dying, until one worker is left."""
    plan = (RoundPlan if rounds else PartitionPlan)(rng.randint(5, 30), rng.randint(1, 4), workers)
    ledger = Ledger(plan, epochs=epochs)
    hands = [refs_of(plan, epochs, rank) for rank in range(workers)]
    missing = {ref for hand in hands for ref in hand}
    late: list[tuple[BatchRef, int]] = []
    alive = list(range(workers))
    while not ledger.finished:
        rank = rng.choice(alive)
        if len(alive) > 1 and rng.random() < 0.02:
            alive.remove(rank)
            ledger.lost(rank)
            continue
        if not hands[rank]:
            hands[rank] += ledger.orphans(rng.randrange(epochs), rng.randint(1, 4), rank)
            assert set(hands[rank]) <= missing
            continue
        late.append((hands[rank].pop(0), rank))
        if rng.random() < 0.5:
            rng.shuffle(late)
        # the living's receipts arrive; the dead's may, or are lost with them
        while late and rng.random() < 0.8:
            ref, sender = late.pop()
            if sender in alive or rng.random() < 0.5:
                assert ledger.receipt(ref, sender) == (ref in missing)
                missing.discard(ref)
            if sender in alive and rng.random() < 0.2:
                assert not ledger.receipt(ref, sender)
        for epoch in range(epochs):
            assert ledger.missing(epoch) == sum(ref.epoch == epoch for ref in missing)
            assert ledger.complete(epoch) == (not any(ref.epoch <= epoch for ref in missing))
    assert not missing


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "give epochs or steps"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"max_batches_per_partition": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_errors(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ledger(PartitionPlan(4, 1, 2), **limits)


@pytest.mark.parametrize("ref", [BatchRef(2, 0, 0), BatchRef(0, 2, 0), BatchRef(0, 0, 2), BatchRef(-1, 0, 0)])
def test_unknown_batches_and_ranks(ref: BatchRef) -> None:
    ledger = Ledger(PartitionPlan(4, 1, 2), epochs=2)
    with pytest.raises(InternalError, match="no minibatch of this run"):
        ledger.receipt(ref, 0)
    with pytest.raises(InternalError, match="the ledger knows 0 to 1"):
        ledger.lost(2)
