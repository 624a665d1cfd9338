"""What becomes of a lost worker's part of rounds that go on without it."""

from __future__ import annotations

from gradstream.coordinator.lead import Lost
from gradstream.coordinator.lost_work import SkippedParts
from gradstream.coordinator.progress import receipt_of
from gradstream.data.base import BatchRef
from gradstream.data.ledger import Ledger
from gradstream.data.plan import RoundPlan
from gradstream.wire import v1

WORKERS, ROUNDS, SIZE = 3, 6, 2


def worker(rank: int) -> v1.Node:
    return v1.Node(name=f"worker-{rank}", role="worker", rank=rank)


class Rounds:
    """Workers that go through rounds, one receipt at a time."""

    def __init__(self) -> None:
        self.ledger = Ledger(RoundPlan(WORKERS * ROUNDS * SIZE, SIZE, WORKERS, seed=0), epochs=1)
        self.skipped = SkippedParts(self.ledger)

    def done(self, rank: int, *numbers: int, finished: bool = False) -> None:
        """Receipts of a worker for these rounds."""
        refs = [BatchRef(0, rank, number) for number in numbers]
        for ref in refs:
            self.ledger.receipt(ref, rank)
        beat = v1.Beat(receipts=map(receipt_of, refs), finished=finished)
        self.skipped.on_beat(worker(rank), beat, 0.0)

    def lost(self, rank: int) -> None:
        self.skipped.on_lost(Lost(worker(rank), "", f"worker-{rank}", {}), 0.0)

    @property
    def dropped(self) -> int:
        """Number of minibatches that are dropped."""
        return sum(self.ledger.dropped.values()) // SIZE


def test_a_lost_workers_part_is_dropped_as_far_as_others_are() -> None:
    rounds = Rounds()
    for rank in range(WORKERS):
        rounds.done(rank, 0, 1)
    rounds.done(0, 2)
    rounds.lost(1)
    assert (rounds.dropped, rounds.ledger.finished) == (1, False)
    rounds.done(0, 3, 4)
    assert rounds.dropped == 3
    rounds.done(2, 2, 3, 4, 5)
    rounds.done(0, 5)
    assert rounds.dropped == 4 and rounds.ledger.finished
    assert rounds.ledger.num_samples == SIZE * (WORKERS * ROUNDS - 4)


def test_nothing_is_dropped_that_a_newcomer_goes_through() -> None:
    rounds = Rounds()
    rounds.lost(1)
    rounds.done(0, 0, 1)
    rounds.skipped.on_join(worker(1), 0.0)
    rounds.done(0, 2, 3, 4)
    assert rounds.dropped == 2  # until it says where it begins
    rounds.done(1, 3)
    assert rounds.dropped == 3
    rounds.done(1, 4, 5)
    rounds.done(0, 5)
    rounds.done(2, *range(ROUNDS))
    assert rounds.dropped == 3 and rounds.ledger.finished


def test_a_newcomer_that_comes_too_late_for_any_round_ends_the_account() -> None:
    rounds = Rounds()
    rounds.lost(1)
    rounds.skipped.on_join(worker(1), 0.0)
    for rank in (0, 2):
        rounds.done(rank, *range(ROUNDS), finished=True)
    assert (rounds.dropped, rounds.ledger.finished) == (0, False)
    rounds.done(1, finished=True)
    assert rounds.dropped == ROUNDS and rounds.ledger.finished


def test_two_that_are_lost_do_not_wait_for_each_other() -> None:
    rounds = Rounds()
    rounds.lost(0)
    rounds.lost(2)
    rounds.done(1, *range(ROUNDS))
    assert rounds.dropped == 2 * ROUNDS and rounds.ledger.finished
