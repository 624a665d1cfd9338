"""Whose answer a worker waited for. Every expected figure can be computed on paper."""

from __future__ import annotations

from typing import Any

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.run.result import Run
from gradstream.runtime.simulation import Cost, Link, Network, SimulationConfig
from gradstream.server.aggregation import PushHeader
from gradstream.server.shard.executor import StragglerTracker
from gradstream.server.shard.state import Apply, Parked
from gradstream.strategies import Strategy
from gradstream.telemetry.meters import Kind, Stopwatch, WaitAttribution, shared_out
from gradstream.testing.runs import Sized, numbered

# ---- pure parts -------------------------------------------------------------------------


def test_each_moment_is_given_once_and_the_last_to_come_goes_first() -> None:
    waiting = [(0, 10), (20, 30)]
    claims = [
        (Kind.SHARD, "shard-0", (0, 30)),
        (Kind.WORKER, "worker-1", (0, 8)),
        (Kind.WORKER, "worker-2", (5, 9)),
        (Kind.OWN, "worker-0", (0, 2)),
    ]
    shares = shared_out(waiting, claims)
    # own 0-2, worker-2 5-9, worker-1 what is left of 0-8, the shard the rest
    assert shares == {"worker-0": 2, "worker-2": 4, "worker-1": 3, "shard-0": 11}
    assert sum(shares.values()) == 20
    assert shared_out(waiting, []) == {}


def test_claims_are_forgotten_once_taken() -> None:
    claims = WaitAttribution()
    claims.note(Kind.SHARD, "shard-0", 0, 5)
    claims.note(Kind.SHARD, "shard-0", 0, 3)  # an earlier answer to the same question
    assert claims.take([(0, 10)]) == {"shard-0": 5}
    assert claims.take([(0, 10)]) == {}


def test_a_step_is_computing_and_waiting() -> None:
    claims = WaitAttribution()
    watch = Stopwatch("worker-0", claims, 0)
    watch.begin(1_000_000_000)
    watch.computed(1_500_000_000, 2_500_000_000)
    watch.worked(2_500_000_000, 2_750_000_000)
    claims.note(Kind.SHARD, "shard-0", 0, 1_400_000_000)
    assert watch.times(3_000_000_000) == {
        "compute_s": 1.0,
        "wait_s": 1.0,
        "compute_at_s": 0.5,
        "waited_for": {"shard-0": 0.4, "worker-0": 0.25},
    }
    watch.begin(3_000_000_000)
    watch.computed(2_000_000_000, 4_000_000_000)  # begun in the step before
    assert watch.times(4_000_000_000)["compute_s"] == 1.0
    watch.begin(3_000_000_000)
    assert watch.times(3_000_000_000)["compute_at_s"] == 0.0  # a step without a gradient


def test_the_last_contributor_is_waited_for_by_all_others() -> None:
    came = StragglerTracker()
    update = tuple(
        Parked(PushHeader(f"worker-{rank}", rank, 1, sequence=1, samples=1), token=rank) for rank in range(3)
    )
    for token, at_us in ((0, 10), (2, 500), (1, 40)):
        came.came(token, 7, 1000 * at_us)
    came.completed(Apply(7, update, step=1))
    waited = came.waited(7, "worker-0", 1000 * 20)
    assert waited is not None
    assert (waited.on, waited.until_us) == ("worker-2", 480)
    assert came.waited(7, "worker-2", 0) is None  # for itself
    assert came.waited(7, "worker-0", 1000 * 500) is None  # asked later
    assert came.waited(8, "worker-0", 0) is None  # no update yet
    assert came.late_s() == {"worker-2": 460e-6}  # after worker-1


# ---- whole runs -------------------------------------------------------------------------

ONE_SECOND = SimulationConfig(
    costs={"gradient": Cost(base_s=1.0)},
    speeds={"worker-2": 0.25},
    network=Network(link=Link(latency_s=1e-4)),
    shape_only=True,
)


def steps_of(run: Run, rank: int) -> list[Any]:
    return [event for event in run.events if event["event"] == "step" and event["rank"] == rank]


def slow_third(strategy: Strategy, config: SimulationConfig = ONE_SECOND, **options: Any) -> Run:
    given: dict[str, Any] = {"workers": 3, "batch_size": 1, "steps": 5, "chunk_elems": 64, "servers": 2}
    return simulate(Sized([64, 64, 64]), numbered(60), config=config, strategy=strategy, **(given | options))


@pytest.mark.parametrize("overlap", [False, True])
def test_rounds_wait_for_the_slowest_worker_and_say_so(overlap: bool) -> None:
    run = slow_third(gs.Synchronous(overlap=overlap))
    for rank in (0, 1):
        for step in steps_of(run, rank)[1:]:
            assert step["wait_s"] == pytest.approx(3.0, abs=2e-3)
            assert step["waited_for"]["worker-2"] == pytest.approx(3.0, abs=2e-3)
            assert sum(step["waited_for"].values()) <= step["wait_s"] + 1e-9
    for step in steps_of(run, 2)[1:]:
        assert set(step["waited_for"]) <= {"shard-0", "shard-1"}
        assert step["wait_s"] < 2e-3


def test_downpour_waits_for_nobody_but_the_shards() -> None:
    run = slow_third(gs.Downpour(overlap=False))
    steps = [step for rank in range(3) for step in steps_of(run, rank)]
    later = {name for step in steps if step["step"] for name in step["waited_for"]}
    assert later <= {"shard-0", "shard-1"} and later
    first = {name for step in steps if not step["step"] for name in step["waited_for"]}
    assert first <= {"shard-0", "shard-1", "worker-0"}  # whose initial parameters all wait for


def test_a_workers_own_sums_are_its_own() -> None:
    config = SimulationConfig(
        costs={"gradient": Cost(base_s=1.0), "copy": Cost(base_s=0.25)}, shape_only=True
    )
    run = slow_third(gs.Downpour(push_every=2, fetch_every=2), config)
    for step in steps_of(run, 1):
        assert step["waited_for"]["worker-1"] == pytest.approx(0.25)


def test_links_add_up_to_exchanges_and_transfers_are_timed() -> None:
    run = slow_third(gs.Downpour())
    for rank in range(3):
        exchanges = [e for e in run.events if e["event"] == "exchange" and e["rank"] == rank]
        links = [e for e in run.events if e["event"] == "link" and e["rank"] == rank]
        assert {link["shard"] for link in links} == {"shard-0", "shard-1"}
        for key in ("pushed_bytes", "fetched_bytes"):
            assert sum(e[key] for e in links) == sum(e[key] for e in exchanges) > 0
        chunks = [sum(sum(e["staleness"].values()) for e in kind) for kind in (links, exchanges)]
        assert chunks[0] == chunks[1] > 0
        pushes = [
            e for e in run.events if e["event"] == "transfer" and e["rank"] == rank and e["kind"] == "push"
        ]
        by_worker = sum(e["pushes"] for e in exchanges) - (rank == 0)  # without the initial parameters
        assert len([e for e in pushes if e["size_bytes"] == 4 * 192]) >= by_worker
        assert all(0 < e["seconds"] < 0.1 for e in pushes)
