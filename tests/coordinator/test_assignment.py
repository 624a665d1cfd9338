"""Minibatches go to workers that ask: nobody has too few, and the last ones are done as early as can be."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gradstream as gs
from gradstream.coordinator.assignment import MOST, BatchAssignment
from gradstream.data import EpochPlan, Ledger, PartitionPlan, QueuePlan
from gradstream.data.base import BatchRef
from gradstream.data.leases import Copy, Leases
from gradstream.data.shares import WorkerSpeed
from gradstream.errors import ConfigError
from gradstream.runtime.simulation import Cost, Exponential, SimulationConfig
from gradstream.testing.runs import kill_at, least_squares

UNEVEN = (1.0, 1.0, 1.0, 0.2)
"""Speeds of four workers: 3.2 together."""


class Workers:
    """Their minibatches take as long as their speeds say, and they ask when half of a block is gone.

    While a worker computes its first minibatch it does not ask: see `BatchQueue`.
    """

    def __init__(
        self,
        plan: EpochPlan,
        speeds: Sequence[float],
        epochs: int = 1,
        lead_s: float = 10.0,
        in_passes: bool = False,
    ) -> None:
        self.ledger = Ledger(plan, epochs=epochs, in_passes=in_passes)
        self.assignment = BatchAssignment(self.ledger, len(speeds), lead_s)
        self.speeds = speeds
        self.present = list(range(len(speeds)))
        self.hands: list[list[BatchRef]] = [[] for _ in speeds]
        self.low = [0] * len(speeds)
        self.stretches = [WorkerSpeed() for _ in speeds]
        self.idle = set(self.present)
        self.done: Counter[int] = Counter()
        self.blocks: list[tuple[int, int]] = []
        self.ends: list[tuple[float, int, BatchRef]] = []
        self.now_s = 0.0

    def ask(self, rank: int, in_hand: int) -> None:
        self.assignment.took(rank, self.stretches[rank], self.present)
        self.stretches[rank] = WorkerSpeed()
        block = self.assignment.block(rank, self.present, in_hand, self.now_s)
        if block:
            self.hands[rank] += block
            self.low[rank] = len(block) // 2
            self.blocks.append((rank, len(block)))

    def look(self) -> None:
        """Whoever has nothing to do asks, and begins what it gets."""
        for rank in sorted(self.idle):
            if not self.hands[rank]:
                self.ask(rank, 0)
            if self.hands[rank]:
                self.idle.discard(rank)
                ref = self.hands[rank].pop(0)
                heapq.heappush(self.ends, (self.now_s + ref.count / self.speeds[rank], rank, ref))
                if len(self.hands[rank]) <= self.low[rank] and self.done[rank]:
                    self.ask(rank, len(self.hands[rank]) + 1)

    def lose(self, rank: int) -> None:
        self.present.remove(rank)
        self.ledger.lost(rank)
        self.idle.discard(rank)
        self.ends = [end for end in self.ends if end[1] != rank]
        heapq.heapify(self.ends)

    def run(self, lost: Sequence[tuple[float, int]] = ()) -> float:
        """The time of the last receipt. Workers are lost when they are said to be."""
        lost = list(lost)
        while not self.ledger.finished:
            self.look()
            assert self.ends or lost, "everybody waits for somebody else"
            while lost and (not self.ends or lost[0][0] <= self.ends[0][0]):
                self.now_s, rank = lost.pop(0)
                self.lose(rank)
                self.look()
            self.now_s, rank, ref = heapq.heappop(self.ends)
            self.ledger.receipt(ref, rank)
            self.done[rank] += ref.count
            self.stretches[rank].took(ref.count, ref.count / self.speeds[rank])
            self.idle.add(rank)
        return self.now_s


def best_s(count: int, speeds: Sequence[float]) -> float:
    """The shortest time for so many minibatches: each goes to the worker that is done with it first."""
    done = [0] * len(speeds)
    for _ in range(count):
        rank = min(range(len(speeds)), key=lambda rank: (done[rank] + 1) / speeds[rank])
        done[rank] += 1
    return max(number / speed for number, speed in zip(done, speeds, strict=True))


@pytest.mark.parametrize("kind", [QueuePlan, PartitionPlan])
def test_a_worker_gets_as_much_as_it_is_fast(kind: type[EpochPlan]) -> None:
    workers = Workers(kind(320, 1, 4), UNEVEN)
    assert workers.run() == pytest.approx(100, abs=1)
    assert [workers.done[rank] for rank in range(4)] == pytest.approx([100, 100, 100, 20], abs=2)


@settings(max_examples=100)
@example([0.2, 0.2, 0.3, 3.0, 3.0, 3.0], 35, 2, QueuePlan)  # 1.41 times if denied for tᵢ alone
@example([0.2, 0.2, 0.2, 0.3, 1.0, 1.0, 1.0, 1.0, 10.0], 97, 1, QueuePlan)  # 1.475 times
@example([10.0, 0.7, 0.3, 0.7], 76, 2, PartitionPlan)  # 1.26: the worst of 7,000 that were drawn
@given(
    st.lists(st.sampled_from([0.05, 0.2, 0.3, 0.7, 1.0, 3.0, 10.0]), min_size=1, max_size=9),
    st.integers(20, 400),
    st.integers(1, 3),
    st.sampled_from([QueuePlan, PartitionPlan]),
)
def test_the_last_minibatch_is_done_about_as_early_as_it_can_be(
    speeds: list[float], samples: int, epochs: int, kind: type[EpochPlan]
) -> None:
    """At the worst a slow worker has done one when it is known how slow it is.

    With few minibatches for each worker, one too many of a slow worker weighs most, at the end of each epoch.
    """
    took_s = Workers(kind(samples, 1, len(speeds)), speeds, epochs).run()
    least_s = best_s(samples * epochs, speeds)
    unmeasured_s = 1 / min(speeds)
    assert least_s - 1e-9 <= took_s <= max(1.3 * least_s + 1 / max(speeds), unmeasured_s + 1e-9)


@pytest.mark.parametrize(("taken", "until_s"), [(0, 5.0), (6, 5.0), (12, 7.5), (14, 10.0)])
def test_a_worker_is_denied_minibatches_only_while_the_others_go_on(taken: int, until_s: float) -> None:
    """Worker 1 takes 5 s for one, in which worker 0 does 50, and 20 are left. Worker 0 takes some, and stops."""
    ledger = Ledger(QueuePlan(20, 1, 2), epochs=1)
    assignment, present = BatchAssignment(ledger, 2, 10.0), [0, 1]
    for _ in range(2):  # the first report is forgotten
        assignment.took(0, WorkerSpeed(4, 4, 4 / 10.0), present)
        assignment.took(1, WorkerSpeed(4, 4, 4 / 0.2), present)
    assert not assignment.block(1, present, 0, 0.0)
    ledger.leases.hand_out(0, taken, 1)
    assert not assignment.block(1, present, 0, until_s - 0.01)
    assert assignment.block(1, present, 0, until_s + 0.01)


def test_blocks_become_smaller_towards_the_end_of_an_epoch() -> None:
    workers = Workers(QueuePlan(1000, 1, 2), [1.0, 1.0], lead_s=1e9)
    workers.run()
    sizes = [size for rank, size in workers.blocks if rank == 0]
    assert max(sizes) > 50
    assert sizes[sizes.index(max(sizes)) :] == sorted(sizes[sizes.index(max(sizes)) :], reverse=True)
    assert sizes[-1] == 1


def test_blocks_take_no_longer_than_they_may() -> None:
    workers = Workers(QueuePlan(100_000, 1, 2), [1.0, 100.0], lead_s=4.0)
    workers.run()
    assert max(size for rank, size in workers.blocks if rank == 0) == 4
    assert max(size for rank, size in workers.blocks if rank == 1) == MOST


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.booleans())
@example(random.Random(8), False)  # a worker is lost between two requests without another change
def test_whoever_is_lost_the_others_go_through_everything(rng: random.Random, measured: bool) -> None:
    speeds = [rng.choice([0.2, 1.0, 2.0]) for _ in range(4)]
    plan = QueuePlan(160, 16 if measured else 4, 4, shares="measured" if measured else None)
    lost = sorted((rng.uniform(0, 400), rank) for rank in rng.sample(range(4), rng.randint(1, 3)))
    workers = Workers(plan, speeds, epochs=2)
    workers.run(lost)
    assert workers.ledger.num_samples == 320


@pytest.mark.parametrize("portions", [25, 50, 100, 150])
def test_a_slow_worker_holds_no_pass_up(portions: int) -> None:
    """Wholes of portions allow 1.024: three workers do 24 of 25 portions in 8 s, and all four 25 in 7.8 s."""
    passes = 5
    workers = Workers(QueuePlan(portions, 1, 4), UNEVEN, passes, in_passes=True)
    assert workers.run() <= 1.03 * passes * portions / 3.2


def test_idle_workers_that_ask_again_cost_one_look_at_the_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that wait ask again at each receipt: with a look for each, a pass of W workers takes W cubed."""
    size = 64
    workers = Workers(QueuePlan(size, 1, size), [1.0] * size, epochs=2, in_passes=True)
    looks, copies = Counter[str](), Leases.copies

    def counted(leases: Leases) -> list[Copy]:
        looks["copies"] += 1
        return copies(leases)

    monkeypatch.setattr(Leases, "copies", counted)
    portions = [workers.assignment.block(rank, workers.present, 0, 0.0)[0] for rank in range(size)]
    for rank in workers.present:
        workers.assignment.took(rank, WorkerSpeed(4, 4, 4, 0), workers.present)
    for rank in range(size // 2):
        workers.ledger.receipt(portions[rank], rank)
        asked = [workers.assignment.block(one, workers.present, 0, 1.0) for one in range(rank + 1)]
        assert not any(asked)  # nobody is late
    assert looks["copies"] == size // 2
    workers.ledger.leases.fence(0)
    assert workers.assignment.block(0, workers.present, 0, 9.0) == ()
    assert workers.assignment.block(1, workers.present, 0, 9.0)  # the others are late by now


def test_a_portion_goes_out_twice_where_the_copy_is_expected_sooner() -> None:
    """Worker 1 begins the last portion when worker 0, five times as fast, has nothing left."""
    workers = Workers(QueuePlan(2, 1, 2), [1.0, 0.2], epochs=2, in_passes=True)

    def ask(rank: int, at_s: float, in_hand: int = 0) -> list[int]:
        return [ref.batch for ref in workers.assignment.block(rank, [0, 1], in_hand, at_s)]

    (slow,), (quick,) = ask(1, 0.0), ask(0, 0.0)
    for rank in (0, 1):
        workers.assignment.took(rank, WorkerSpeed(4, 4, 4 / workers.speeds[rank], 0), workers.present)
    assert ask(0, 0.5, in_hand=1) == []  # it is busy
    workers.ledger.receipt(BatchRef(0, 0, quick), 0)
    assert ask(0, 4.1) == []  # worker 1 is done at 5, the copy would be at 5.1
    assert ask(0, 5.9) == []  # 0.9 s late: expected to be as late again
    assert ask(0, 6.1) == [slow]
    assert ask(0, 9.0) == []  # nobody computes a third


def test_sizes_follow_the_speeds() -> None:
    workers = Workers(QueuePlan(20_000, 64, 4, shares="measured"), UNEVEN)
    workers.run()
    assert workers.assignment._sizes == (80, 80, 80, 16)


def test_a_worker_that_others_are_to_relieve_is_given_something_if_they_do_not_come() -> None:
    workers = Workers(QueuePlan(8, 1, 2), [1.0, 0.1])
    for rank in (0, 1):
        workers.assignment.took(rank, WorkerSpeed(4, 4, 4 / workers.speeds[rank], 0), workers.present)
    assert workers.assignment.block(1, [0, 1], 0, 0.0) == ()
    assert workers.assignment.block(1, [0, 1], 0, 9.0) == ()
    assert len(workers.assignment.block(1, [0, 1], 0, 11.0)) == 1


# ---- whole runs -------------------------------------------------------------------------------


def simulated(strategy: Any, epochs: int = 2, **options: Any) -> gs.Run:
    model, data = least_squares(8000, 8)
    config = SimulationConfig(costs={"gradient": Cost(per_sample_s=1e-3)}, speeds={"worker-3": UNEVEN[3]})
    return gs.simulate(
        model, data, strategy=strategy, workers=4, batch_size=32, epochs=epochs,
        optimizer=gs.optim.SGD(lr=2.0**-12), config=options.pop("config", config), **options,
    )  # fmt: skip


IDEAL_S = 2 * 8.0 / sum(UNEVEN)


@pytest.mark.parametrize(
    ("strategy", "assignment"),
    [(gs.Downpour(), "queue"), (gs.Downpour(), "partitions"),
     (gs.Downpour(push_every=10, fetch_every=10), "queue"),
     (gs.strategies.StalenessAware(), "partitions"), (gs.ElasticAveraging(), "queue")],
    ids=repr,
)  # fmt: skip
def test_without_rounds_uneven_workers_lose_nothing(strategy: Any, assignment: Any) -> None:
    run = simulated(strategy, assignment=assignment)
    assert run.summary["samples_accounted"] == 16_000
    assert run.summary["train_s"] <= 1.05 * IDEAL_S


@pytest.mark.parametrize("strategy", ["synchronous", "ssp", gs.ParameterAveraging(every=10)])
def test_where_workers_wait_for_each_other_sizes_that_fit_the_speeds_do_it(strategy: Any) -> None:
    assert simulated(strategy, epochs=1).summary["train_s"] >= 3.8 * IDEAL_S / 2
    assert simulated(strategy, epochs=4, shares="measured").summary["train_s"] <= 2 * 1.1 * IDEAL_S


@pytest.mark.parametrize(
    ("strategy", "assignment"),
    [
        (gs.Downpour(), "queue"),
        (gs.Downpour(push_every=10), "partitions"),
        (gs.Softsync(), "queue"),
    ],
    ids=repr,
)
def test_a_very_slow_worker_does_one_minibatch_where_the_others_are_done_by_then(
    strategy: Any, assignment: Any
) -> None:
    """Its first takes 10.7 s, in which the others do all; a second would be waited for as long again."""
    config = SimulationConfig(costs={"gradient": Cost(per_sample_s=1e-3)}, speeds={"worker-3": 0.003})
    run = simulated(strategy, assignment=assignment, config=config)
    assert run.summary["samples_accounted"] == 16_000
    assert [row["rank"] for row in run.history].count(3) == 1
    assert run.summary["train_s"] <= 1.01 * 32e-3 / 0.003


@pytest.mark.parametrize("rank", [0, 3])  # a fast one and the slow one
def test_a_death_costs_what_the_dead_worker_would_have_done(rank: int) -> None:
    at_s = 2.0
    run = simulated("downpour", script=kill_at(f"worker-{rank}", at_s))
    assert run.summary["samples_accounted"] == 16_000
    lease_s = 10.0  # the others have enough to do until it is noticed
    left = sum(UNEVEN) - UNEVEN[rank]
    allowed_s = at_s + (16.0 - at_s * sum(UNEVEN)) / left
    assert run.summary["train_s"] <= max(1.1 * allowed_s, at_s + lease_s + 2.0)


@pytest.mark.parametrize("seed", range(2))
def test_times_that_vary_lose_little(seed: int) -> None:
    config = SimulationConfig(
        costs={"gradient": Cost(per_sample_s=1e-3, jitter=Exponential())},
        speeds={"worker-3": UNEVEN[3]},
    )
    run = simulated("downpour", config=config, seed=seed)
    assert run.summary["train_s"] <= 1.15 * IDEAL_S


def test_samples_a_second_are_as_many_with_short_epochs() -> None:
    model, data = least_squares(64, 8)
    config = SimulationConfig(costs={"gradient": Cost(per_sample_s=1e-4)})
    run = gs.simulate(
        model, data, strategy="downpour", workers=4, batch_size=8, epochs=40, config=config,
        optimizer=gs.optim.SGD(lr=2.0**-12),
    )  # fmt: skip
    assert run.summary["train_s"] <= 1.25 * 40 * 64 * 1e-4 / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "synchronous", "assignment": "queue"}, "assignment"),
        ({"assignment": "ring"}, "expected 'queue' or 'partitions'"),
        ({"assignment": "queue", "shares": [1, 2, 3, 4]}, "there are no shares"),
        ({"shares": [3, 1, 1, 1]}, "leave shares out"),
        ({"assignment": "partitions", "shares": "measured"}, "partitions are fixed at its begin"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulated(options.pop("strategy", "downpour"), **options)


def test_a_stream_cannot_be_a_queue() -> None:
    def batches(rank: int, config: int, epoch: int, seed: int) -> Any:
        yield np.ones((4, 8)), np.ones(4)

    model, _ = least_squares(8, 8)
    stream = gs.from_stream(batches, batches=1)
    with pytest.raises(ConfigError, match=r"assignment='queue'.*leave assignment out"):
        gs.simulate(model, stream, strategy="downpour", workers=2, epochs=1, assignment="queue")
