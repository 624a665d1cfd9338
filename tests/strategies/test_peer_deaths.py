"""Workers that exchange in pairs die, are silent, and are replaced: what that costs whom."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import PeerLostError
from gradstream.report.worker_figures import alone_text
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.runtime.simulation import Cost, Link, Network, Partition, SimulationConfig
from gradstream.strategies.matching import partner_of
from gradstream.testing.runs import QUICK, UNSTEADY, Sized, kill_at, least_squares, numbered, replace_at
from killing import Killer
from peer_runs import alone, bytes_of, noted
from whole_runs import train

Gossip, NoLoCo, PushSum = gs.strategies.Gossip, gs.strategies.NoLoCo, gs.strategies.PushSum
FAR = {
    (f"worker-{one}", f"worker-{other}"): Link(latency_s=5e-3)
    for one in range(5)
    for other in range(5)
    if one != other
}
STEADY = SimulationConfig(costs={"gradient": Cost(base_s=0.02)}, network=Network(links=FAR))
"""A round has 20 ms of computing, and four ways of 5 ms between two workers."""

ROUNDS = 8
BOTH = pytest.mark.parametrize("strategy", [Gossip(every=2), NoLoCo(every=2)], ids=["gossip", "noloco"])
ALL = pytest.mark.parametrize(
    "strategy", [Gossip(every=2), NoLoCo(every=2), PushSum(every=2)], ids=["gossip", "noloco", "push-sum"]
)


def small(workers: int, strategy: gs.Strategy, **options: Any) -> gs.Run:
    model, data = least_squares(4 * 2 * workers * ROUNDS, 200, whole=False, reduction="mean")
    given: dict[str, Any] = {
        "batch_size": 4, "epochs": 1, "optimizer": gs.optim.SGD(0.001), "config": STEADY, "deadlines": QUICK, "seed": 0,
    }  # fmt: skip
    return simulate(model, data, strategy=strategy, workers=workers, **{**given, **options})


def ends_s(run: gs.Run) -> dict[int, list[float]]:
    """By rank, when each round ended."""
    found = defaultdict(list)
    for event in run.events:
        if event["event"] == "step":
            found[event["rank"]].append(event["time_s"])
    return found


@BOTH
@pytest.mark.parametrize(("workers", "after_s"), [(4, 0.019), (4, 0.012), (4, 0.006), (5, 0.012)])
def test_a_death_in_an_exchange_costs_its_partner_one_round_and_the_others_nothing(
    strategy: gs.Strategy, workers: int, after_s: float
) -> None:
    """It dies so long before its third exchange would be done."""
    whole = small(workers, strategy)
    at_s = ends_s(whole)[1][2] - after_s
    assert partner_of(1, 0, 2, workers, range(workers)) is not None
    run = small(workers, strategy, script=kill_at("worker-1", at_s))
    partner = partner_of(1, 0, 2, workers, range(workers))
    assert [(one["rank"], one["round"], one["partner"]) for one in alone(run)] == [(partner, 2, "worker-1")]
    assert run.summary["alone"] == {f"worker-{partner}": 1}
    assert f"worker-{partner} went through 1 round without worker-1, first round 2: " in alone_text(
        alone(run)
    )
    pace_s = max(times[0] for times in ends_s(whole).values())
    for rank, times in ends_s(run).items():
        if rank not in (1, partner):
            assert times[:3] == pytest.approx(ends_s(whole)[rank][:3], abs=1e-5)
        if rank != 1:
            assert all(at < pace_s * number + 1e-4 for number, at in enumerate(times, 1))
    lost = 4 * 2 * (ROUNDS - 2)
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_dropped"] == lost
    assert run.summary["samples_accounted"] == 4 * 2 * workers * ROUNDS - lost


@BOTH
def test_a_silent_partner_is_given_up_after_the_silence(strategy: gs.Strategy) -> None:
    """The link between two workers is cut for a while; both stay members, and nothing is dropped."""
    workers = 4
    other = partner_of(0, 0, 2, workers, range(workers))
    ends = frozenset({"worker-0"}), frozenset({f"worker-{other}"})
    whole = ends_s(small(workers, strategy))
    cuts = [Partition(whole[0][1], 5.0, *ends), Partition(whole[0][1], 5.0, *reversed(ends))]
    network = Network(links=FAR, partitions=cuts)
    run = small(workers, strategy, config=SimulationConfig(costs=STEADY.costs, network=network))
    gone = {(one["rank"], one["partner"]) for one in alone(run)}
    assert gone == {(0, f"worker-{other}"), (other, "worker-0")}
    assert "silent" in alone(run)[0]["reason"] or "for 0.2 s" in alone(run)[0]["reason"]
    assert not run.summary["workers_lost"] and not run.summary["samples_dropped"]
    meetings = len(alone(run)) / 2
    assert max(times[-1] for times in ends_s(run).values()) < whole[0][-1] + meetings * 1.5 * QUICK.silence_s


@ALL
@pytest.mark.parametrize("seed", range(4))
def test_whoever_dies_and_comes_back_every_sample_is_accounted_for(strategy: gs.Strategy, seed: int) -> None:
    """Drawn schedules: two deaths of five workers, one of which is replaced. Nothing hangs."""
    rng, workers = random.Random(seed), 5
    first, second = rng.sample([f"worker-{rank}" for rank in range(workers)], 2)

    async def script(cluster: Any) -> None:
        await replace_at(first, rng.uniform(0.05, 0.3), rng.choice([0.0, 0.02, 0.1]))(cluster)
        await kill_at(second, rng.uniform(0.0, 0.1))(cluster)

    run = small(workers, strategy, epochs=3, config=UNSTEADY, script=script, seed=seed)
    total = 3 * 4 * 2 * workers * ROUNDS
    assert run.summary["samples_accounted"] + run.summary["samples_dropped"] == total
    assert run.summary["samples_dropped"] < total / 2 and second in run.summary["workers_lost"]
    assert all(
        "worker" in one["reason"] or "no member" in one["reason"] or "lost" in one["reason"]
        for one in alone(run)
    )


@ALL
def test_a_newcomer_copies_a_live_worker_and_meets_others_from_then_on(
    strategy: gs.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = noted(monkeypatch)
    run = small(
        4, strategy, epochs=4, script=replace_at("worker-2", 0.31, 0.05), optimizer=gs.optim.Adam(0.01)
    )
    back_s = next(e["time_s"] for e in run.events if e["event"] == "joined" and e["epoch"] > 1)
    steps = [e for e in run.events if e["event"] == "step" and e["rank"] == 2 and e["time_s"] > back_s]
    gap = [number for number, own in notes.own.items() if 2 not in own]
    first = max(gap) + 1
    copied = [notes.own[first - 1][rank] for rank in (0, 1, 3) if rank in notes.own[first - 1]]
    begun = notes.given[first][2][-1]  # of NoLoCo the slow weights, with which the round began
    if isinstance(strategy, NoLoCo):
        assert any(np.array_equal(begun, one) for one in copied)
    assert len(steps) == 4 * ROUNDS - first
    assert 8 * len(gap) <= run.summary["samples_dropped"] <= 8 * first  # the last receipts died with it
    assert not [one for one in alone(run) if one["round"] >= first + 2]
    assert bytes_of(run)[2][0] > len(steps) / 2 * 8 * 200


@ALL
def test_a_simulation_of_shapes_has_the_bytes_and_the_newcomers(strategy: gs.Strategy) -> None:
    options: dict[str, Any] = {
        "workers": 4,
        "batch_size": 4,
        "epochs": 2,
        "deadlines": QUICK,
        "strategy": strategy,
    }
    config = SimulationConfig(costs=STEADY.costs, network=STEADY.network, shape_only=True)
    run = gs.simulate(Sized([1000, 500]), numbered(256), config=config, **options)
    each = {Gossip: 6000, NoLoCo: 12000, PushSum: 6004}[type(strategy)]
    assert run.summary["pushed_bytes"] == 4 * 16 * each
    script = replace_at("worker-1", 0.1, 0.05)
    run = gs.simulate(Sized([1000, 500]), numbered(256), config=config, script=script, **options)
    assert run.summary["samples_accounted"] + run.summary["samples_dropped"] == 512


def test_a_run_whose_workers_all_die_but_one_ends_with_that_one() -> None:
    async def script(cluster: Any) -> None:
        for name in ("worker-0", "worker-2", "worker-1"):
            await kill_at(name, 0.1)(cluster)

    run = small(4, Gossip(every=2), epochs=2, script=script)
    assert sorted(run.summary["workers_lost"]) == ["worker-0", "worker-1", "worker-2"]
    assert 0 < np.abs(run.parameters["w"]).max() < np.inf


def test_without_any_worker_left_it_ends_by_name() -> None:
    async def script(cluster: Any) -> None:
        for name in ("worker-0", "worker-1"):
            await kill_at(name, 0.1)(cluster)

    with pytest.raises(PeerLostError, match="no worker is left"):
        small(2, Gossip(every=2), script=script)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("logs"), node_environment(2)) as cluster:
        yield cluster


JOB = """
import time
import numpy as np
import gradstream as gs

def gradient(parameters, inputs, targets):
    time.sleep(0.005)
    return {"w": inputs.T @ (inputs @ parameters["w"] - targets) / len(inputs)}

def job():
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(3)}, outputs=lambda p, x: x @ p["w"], gradients=gradient
    )
    inputs = np.random.default_rng(0).normal(size=(1200, 3)).astype(np.float32)
    return gs.Job(
        model, gs.from_arrays(inputs, inputs @ np.array([1, 2, 3], np.float32)), strategy="noloco",
        strategy_options={"every": 2}, optimizer=gs.optim.SGD(lr=0.05), workers=4, batch_size=5, epochs=2,
        checkpoint_every=None, max_restarts=0,
    )
"""


def test_a_process_that_is_killed_stops_nobody(tmp_path: Path, cluster: LocalCluster) -> None:
    (tmp_path / "job.py").write_text(JOB)
    killer = Killer(cluster, "step", 40, "worker-1")
    run = train(f"{tmp_path}/job.py:job", tmp_path / "run", cluster, on_event=killer)
    killer.bury()
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_accounted"] + run.summary["samples_dropped"] == 2 * 1200
    assert 0 < run.summary["samples_dropped"] < 2 * 300
    assert {one["partner"] for one in alone(run)} <= {"worker-1"}
    assert np.allclose(run.parameters["w"], [1, 2, 3], atol=0.05)
    gaps = [gap for times in ends_s(run).values() for gap in np.diff(times)]
    assert (
        max(gaps) < 7
    )  # a worker that misses its partner's call hears of it at the next sign of life, after 7.5 s


@ALL
@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.05])
def test_the_partner_of_a_newcomer_does_not_wait_for_it_while_it_copies_that_partner(
    strategy: gs.Strategy, after_s: float
) -> None:
    """Of two workers: the newcomer needs a state between two rounds of the one that would wait for it."""
    run = small(2, strategy, epochs=3, script=replace_at("worker-1", 0.15, after_s))
    steps = [e for e in run.events if e["event"] == "step" and e["rank"] == 1 and e["time_s"] > 0.25]
    assert len(steps) > ROUNDS
    assert run.summary["samples_accounted"] + run.summary["samples_dropped"] == 3 * 4 * 2 * 2 * ROUNDS
