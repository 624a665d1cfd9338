"""Shares of a round by measured speed: who takes how much, and that no number of the result depends on it."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
from torch.utils.data import DataLoader

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.coordinator.assignment import ShareBalance
from gradstream.data.base import BatchRef, PartitionSpec
from gradstream.data.feed import feed_of, plan_of
from gradstream.data.plan import JoinedPlan, PartitionPlan, RoundPlan
from gradstream.data.shares import WorkerSpeed, begins_window, divided_by_speed, window_end
from gradstream.errors import ConfigError, InternalError
from gradstream.report.figures import figures_of
from gradstream.report.page import PageSource, page
from gradstream.report.reason import reason_of
from gradstream.report.staleness import shares_table
from gradstream.run.result import Run
from gradstream.runtime.simulation import Cost, LogNormal, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.telemetry.events import EventDict
from gradstream.testing.runs import least_squares
from gradstream.worker.schedule import ShareReporter

GRID = 2.0**-10


# ---- dealing ----------------------------------------------------------------------------


@pytest.mark.parametrize("speeds", [(1.0,), (1, 1, 1), (4, 4, 4, 1), (0.3, 7.7, 1e-3), (5, 1e6, 2.5)])
@pytest.mark.parametrize("total", [4, 7, 12])
def test_the_last_worker_is_done_as_early_as_can_be(speeds: Sequence[float], total: int) -> None:
    def longest_s(sizes: Sequence[int]) -> float:
        return max(size / speed for size, speed in zip(sizes, speeds, strict=True))

    sizes = divided_by_speed(total, speeds)
    assert sum(sizes) == total
    assert min(sizes) >= 1
    every = itertools.product(range(1, total + 1), repeat=len(speeds))
    assert longest_s(sizes) == min(longest_s(other) for other in every if sum(other) == total)


def test_stretches_double() -> None:
    begins = [batch for batch in range(70) if begins_window(batch)]
    assert begins == [0, 1, 2, 4, 8, 16, 32, 64]
    assert [window_end(batch) for batch in (0, 1, 2, 3, 4, 7, 8, 15, 16)] == [1, 2, 4, 4, 8, 8, 16, 16, 32]


def stretch(rounds: int, samples: int, seconds: float) -> WorkerSpeed:
    """So many gradients, each of these samples and seconds."""
    speed = WorkerSpeed()
    for _ in range(rounds):
        speed.took(samples, seconds)
    speed.took(0, 0.0)
    return speed


def test_an_estimate_forgets_and_knows_how_sure_it_is() -> None:
    speed = WorkerSpeed()
    assert (speed.per_s, speed.error) == (None, math.inf)
    speed.measured(stretch(64, 10, 1.0))
    assert (speed.per_s, speed.error) == (10.0, 0.0)
    speed.measured(stretch(64, 10, 2.0))
    assert speed.per_s == pytest.approx((32 + 64) * 10 / (32 + 64 * 2))
    per_sample = np.array([0.1] * 32 + [0.2] * 64)
    assert speed.error == pytest.approx(per_sample.std() / per_sample.mean() / math.sqrt(96))


# ---- the plan ---------------------------------------------------------------------------


def ids_of(plan: RoundPlan, epochs: int) -> list[np.ndarray[Any, Any]]:
    """The joined batch of each round."""
    ranks = range(plan.num_partitions)
    return [
        np.concatenate([plan.ids(BatchRef(epoch, rank, batch)) for rank in ranks])
        for epoch in range(epochs)
        for batch in range(plan.batches_in(0, epoch))
    ]


def test_the_joined_batch_is_the_same_whatever_the_shares() -> None:
    even, uneven = RoundPlan(101, 8, 3, seed=4), RoundPlan(101, 8, 3, seed=4, shares="measured")
    for place, sizes in (((0, 2), (20, 3, 1)), ((0, 4), (1, 22, 1)), ((1, 0), (7, 8, 9))):
        uneven.reassign(*place, sizes)
    for joined, expected in zip(ids_of(uneven, 2), ids_of(even, 2), strict=True):
        assert np.array_equal(joined, expected)
    taken = [uneven.size(BatchRef(0, 0, batch)) for batch in range(5)]
    assert taken == [8, 8, 20, 20, 1]  # the last round has 5 samples: 1/24 of them, rounded up
    assert uneven.sizes(0, 3) == (20, 3, 1)
    assert uneven.done_with(0, [BatchRef(0, rank, 2) for rank in range(3)]).parts == {0: ((48, 72),)}


def test_rounds_that_are_joined_are_divided_alike() -> None:
    plan = JoinedPlan(RoundPlan(64, 4, 2, shares="measured"), 3)
    plan.reassign(0, 1, (7, 1), until=2)
    assert [plan.size(BatchRef(0, 0, batch)) for batch in range(3)] == [12, 21, 14]
    assert plan.sizes(0, 0) == (4, 4)
    assert isinstance(plan.plan, RoundPlan)
    assert plan.plan.known_until(BatchRef(0, 0, 3)) == 6


def test_shares_that_make_no_sense() -> None:
    plan = RoundPlan(100, 10, 2, shares="measured")
    plan.reassign(0, 4, (15, 5))
    for place, sizes in (((0, 5), (15, 6)), ((0, 5), (20,)), ((0, 5), (21, -1)), ((0, 3), (10, 10))):
        with pytest.raises(InternalError):
            plan.reassign(*place, sizes)
    with pytest.raises(ConfigError, match="partitions are fixed at its begin"):
        PartitionPlan(100, 10, 2, shares="measured")
    with pytest.raises(ConfigError, match="a round has 2 samples for 3 workers"):
        RoundPlan(100, (2, 0, 0), 3, shares="measured")


# ---- deciding ---------------------------------------------------------------------------


def test_one_decision_is_made_of_what_all_have_said() -> None:
    balance = ShareBalance(RoundPlan(1000, 10, 3, shares="measured"))
    for rank, seconds in ((0, 1.0), (2, 0.5)):
        balance.took(rank, (0, 4), stretch(3, 10, seconds / 3))
        assert balance.decide((0, 1, 2)) is None
    assert balance.decided((0, 4)) is None
    balance.took(1, (0, 4), stretch(3, 10, 1 / 3))
    balance.took(1, (0, 4), stretch(3, 10, 1.0))  # said twice
    event = balance.decide((0, 1, 2))
    assert event is not None
    assert (event.samples, event.per_s, event.changed) == ([8, 7, 15], [30.0, 30.0, 60.0], True)
    assert balance.decided((0, 4)) == (8, 7, 15)
    assert balance.decide((0, 1, 2)) is None


def test_what_would_gain_little_changes_nothing() -> None:
    balance = ShareBalance(RoundPlan(1000, 100, 2, shares="measured"))
    balance.took(0, (0, 4), stretch(3, 100, 1.0))
    balance.took(1, (0, 4), stretch(3, 100, 1.08))
    event = balance.decide((0, 1))
    assert event is not None
    assert (event.samples, event.changed) == ([100, 100], False)


def test_a_lost_workers_share_goes_to_the_others() -> None:
    balance = ShareBalance(RoundPlan(1000, 10, 3, shares="measured"))
    for rank in (0, 2):
        balance.took(rank, (0, 4), stretch(3, 10, 1.0))
    event = balance.decide((0, 2))
    assert event is not None
    assert event.samples == [15, 0, 15]


@pytest.mark.parametrize("joined", [1, 20])
def test_a_worker_looks_no_further_than_what_is_decided_and_leaves_out_its_first_gradient(
    joined: int,
) -> None:
    """The first one counts where it is of many minibatches."""
    said: list[tuple[int, float, float]] = []

    class PageSource:
        async def shares(self, ref: BatchRef, measured: WorkerSpeed) -> Sequence[int]:
            said.append((ref.batch, measured.rounds, measured.seconds))
            return (6, 2)

    async def main() -> None:
        inner = RoundPlan(1000 * joined, 4, 2, shares="measured")
        plan = inner if joined == 1 else JoinedPlan(inner, joined)
        balance = ShareReporter(plan, PageSource())
        for batch in range(20):
            ref = BatchRef(0, 0, batch)
            await balance.reach(ref)
            assert inner.known_until(BatchRef(0, 0, batch * joined)) == joined * window_end(batch)
            assert plan.size(ref) == joined * (6 if batch else 4)
            balance.took(plan.size(ref) or 0, 1.0 if batch else 100.0)

    asyncio.run(main())
    first = (1, 0, 0.0) if joined == 1 else (1, 1, 100.0)
    assert said == [first, (2, 1, 1.0), (4, 2, 2.0), (8, 4, 4.0), (16, 8, 8.0)]


# ---- whole runs on virtual time ---------------------------------------------------------


def shares_of(run: Run) -> list[EventDict]:
    return [event for event in run.events if event["event"] == "shares"]


def round_s(run: Run, epoch: int) -> float:
    """Mean seconds of a round of an epoch, as worker 0 saw it."""
    steps = [e for e in run.events if e["event"] == "step" and e["rank"] == 0 and e["epoch"] == epoch]
    return float(np.mean([event["compute_s"] + event["wait_s"] for event in steps]))


def uneven(shares: Literal["measured"] | None, *, spread: float = 0.0, **options: Any) -> Run:
    """Four workers, of which the last is 4 times slower; integer data, so that sums are exact."""
    model, data = least_squares(2048, 64, grid=GRID)
    cost = Cost(per_sample_s=1e-3, jitter=LogNormal(spread))
    config = SimulationConfig(costs={"gradient": cost}, speeds={"worker-3": 0.25})
    options = {"workers": 4, "batch_size": 32, "epochs": 3, "seed": 1, "chunk_elems": 64, **options}
    return simulate(model, data, config=config, shares=shares, optimizer=gs.optim.SGD(lr=2.0**-7), **options)


def test_a_slow_worker_gets_less_and_rounds_take_what_all_speeds_together_allow() -> None:
    equal, measured = uneven(None), uneven("measured")
    ideal_s = 4 * 32 / (3 * 1000 + 250)
    assert round_s(equal, 2) == pytest.approx(32 / 250, rel=0.01)
    assert round_s(measured, 2) == pytest.approx(ideal_s, rel=0.03)  # samples are whole
    assert round_s(equal, 2) / round_s(measured, 2) > 3.1
    assert [event["batch"] for event in shares_of(measured)][:3] == [1, 2, 4]
    samples = [event["samples"] for event in shares_of(measured)]
    assert samples == [[32] * 4] + [[40, 40, 39, 9]] * (len(samples) - 1)
    assert [event["changed"] for event in shares_of(measured)] == [False, True] + [False] * 12
    assert measured.parameters["w"].tobytes() == equal.parameters["w"].tobytes()


def test_shares_do_not_follow_noise() -> None:
    """Log-normal times of σ = 0.3: shares come near the ideal ones, and stay."""
    for seed in range(2):
        run = uneven("measured", spread=0.3, seed=seed, epochs=8)
        late = [event for event in shares_of(run) if event["epoch"] >= 2]
        assert len(late) == 6 * 5  # before rounds 0, 1, 2, 4 and 8 of 16
        assert sum(event["changed"] for event in late) <= 1, [event["samples"] for event in late]
        longest_s = [max(np.array(event["samples"]) / [1000, 1000, 1000, 250]) for event in late]
        assert max(longest_s) < 1.2 * 128 / 3250
        assert longest_s[-1] < 1.05 * 128 / 3250


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    balance = ShareBalance(RoundPlan(10_000, 50, 2, shares="measured"))
    taken = []
    for epoch in range(12):
        for batch, rounds in ((4, 3), (8, 4), (16, 8), (32, 16)):
            for rank, per_s in enumerate((100.0, 100.0 if epoch < 2 else 25.0)):
                size = balance.sizes[rank]
                balance.took(rank, (epoch, batch), stretch(rounds, size, size / per_s))
            balance.decide((0, 1))
        taken.append(balance.sizes[1])
    assert taken[:2] == [50, 50]
    assert taken[2] < 40
    assert taken[-1] == pytest.approx(20, abs=1.5), taken


@pytest.mark.parametrize(
    "options", [{"accumulate": 2, "servers": 3}, {"batch_size": [100, 0, 20, 8]}, {"strategy": "allreduce"}]
)
def test_the_bits_are_those_of_equal_shares(options: dict[str, Any]) -> None:
    measured = uneven("measured", spread=0.2, **options)
    assert any(event["changed"] for event in shares_of(measured))
    assert measured.summary["samples_accounted"] == 3 * 2048
    options.pop("batch_size", None)
    assert measured.parameters["w"].tobytes() == uneven(None, **options).parameters["w"].tobytes()


def test_a_worker_that_goes_by_other_shares_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: worker 1 does not do what was decided."""
    before = uneven("measured").parameters["w"]
    reach = ShareReporter.reach

    async def stubborn(self: ShareReporter, ref: BatchRef) -> None:
        await reach(self, ref)
        if ref.partition == 1 and (ref.epoch, ref.batch) == (0, 4):
            self._plan.reassign(0, 4, (32, 32, 32, 32), until=8)

    monkeypatch.setattr(ShareReporter, "reach", stubborn)
    assert not np.array_equal(uneven("measured").parameters["w"], before)


def test_a_resumed_run_goes_on_with_the_shares_it_had() -> None:
    def first_size(run: Run) -> int:
        steps = [e for e in run.events if e["event"] == "step" and e["rank"] == 3]
        return int(steps[0]["samples"])

    whole = uneven("measured")
    storage = MemoryStorage()
    uneven("measured", storage=storage, checkpoint_every=21, epochs=2)
    resumed = uneven("measured", storage=storage, resume=True)
    assert first_size(whole) == 32
    assert first_size(resumed) == 9
    assert resumed.parameters["w"].tobytes() == whole.parameters["w"].tobytes()


def test_the_report_shows_the_shares() -> None:
    run = uneven("measured", steps=6, epochs=None)
    assert run.summary["shares"] == {f"worker-{rank}": size for rank, size in enumerate((40, 40, 39, 9))}
    head, (change, speeds) = shares_table(run.events)
    assert head == ["from", ">worker-0", ">worker-1", ">worker-2", ">worker-3"]
    assert change == ["epoch 0, round 2", "40", "40", "39", "9"]
    assert speeds == ["speed, measured last", "1,000/s", "1,000/s", "1,000/s", "250/s"]
    assert "<h2>Shares</h2>" in page(PageSource(title="x", events=run.events))
    equal = uneven(None, steps=6, epochs=None)
    assert shares_table(equal.events) == ([], [])
    assert 'shares="measured"' in reason_of(figures_of(equal.events)).remedy


# ---- what cannot be -----------------------------------------------------------------------


def test_where_shares_cannot_be_measured() -> None:
    model, data = least_squares(64, 4)
    options: dict[str, Any] = {"strategy": "downpour", "assignment": "partitions", "shares": "measured"}
    with pytest.raises(ConfigError, match="partitions are fixed at its begin"):
        simulate(model, data, workers=2, epochs=1, **options)

    def batches(rank: int, config: int, epoch: int, seed: int) -> Any:
        yield np.ones((4, 4)), np.ones(4)

    with pytest.raises(ConfigError, match="leave out shares"):
        simulate(model, gs.from_stream(batches, batches=1), workers=2, epochs=1, shares="measured")
    with pytest.raises(ConfigError, match=r"shares='fast'.*expected"):
        simulate(model, data, workers=2, epochs=1, shares="fast")  # type: ignore[arg-type]


def test_a_loaders_processes_read_no_further_than_is_known() -> None:
    """Samples are read ahead up to the next stretch; then by the shares that were decided meanwhile."""
    items = [(np.float32(number), number) for number in range(64)]
    data = gs.from_loader(DataLoader(items, batch_size=4, num_workers=1))  # type: ignore[arg-type]
    plan = plan_of(data, PartitionSpec(
        partitioning="rounds", batch_size=4, workers=2, seed=3, shares="measured", epochs=1, steps=None
    ))  # fmt: skip
    assert isinstance(plan, RoundPlan)
    feed = feed_of(data, plan, 0, seed=0)
    plan.reassign(0, 0, (4, 4), until=2)
    seen = []
    for batch in range(6):
        if batch == 2:
            plan.reassign(0, 2, (6, 2), until=4)
        if batch == 4:
            plan.reassign(0, 4, (1, 7))
        seen.append(feed.read(BatchRef(0, 0, batch)).targets.tolist())
    assert [len(targets) for targets in seen] == [4, 4, 6, 6, 1, 1]
    assert [first for first, *_ in seen] == [8 * batch for batch in range(6)]
