"""Rounds whose shares follow measured speeds go on without a lost worker, and a new process learns its share."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.testing.runs import QUICK, kill_at, least_squares, replace_at
from gradstream.worker.schedule import ShareReporter

WORKERS, EPOCHS, SAMPLES = 3, 2, 360
MODEL, DATA = least_squares(SAMPLES, 150, whole=False, reduction="mean")
WORLD = SimulationConfig(
    costs={"gradient": Cost(per_sample_s=0.006, jitter=Exponential()), "apply": Cost(base_s=1e-3)},
    speeds={"worker-2": 0.25},
    network=Network(link=Link(latency_s=1e-3, jitter_s=1e-3), bandwidth_bytes_s=1e6),
)
JOB: dict[str, Any] = {
    "optimizer": gs.optim.SGD(lr=0.01), "workers": WORKERS, "batch_size": 4, "epochs": EPOCHS, "chunk_elems": 64,
    "deadlines": QUICK, "config": WORLD, "shares": "measured",
}  # fmt: skip
UNTIL_S = 4.0
"""About the length of such a run."""

STRATEGIES = {
    "synchronous": gs.Synchronous(),
    "allreduce": gs.AllReduce(algorithm="ring"),
    "local SGD": gs.LocalSGD(every=2),
}


def run_with(script: Any, strategy: gs.Strategy, **options: Any) -> tuple[gs.Run, list[Any]]:
    events: list[Any] = []
    given = {**JOB, "strategy": strategy, **options}
    return simulate(MODEL, DATA, script=script, on_event=events.append, **given), events


@pytest.fixture(scope="module")
def whole() -> Any:
    """The parameters of a run with fixed and equal shares in which nobody dies: the same joined minibatches."""
    return run_with(None, gs.Synchronous(), shares=None)[0].parameters["w"]


def check(run: gs.Run, strategy: gs.Strategy, whole: Any) -> None:
    assert run.summary["samples_accounted"] == EPOCHS * SAMPLES
    if not isinstance(strategy, gs.LocalSGD):
        np.testing.assert_allclose(run.parameters["w"], whole, rtol=1e-9, atol=1e-12)


def shares_of(events: list[Any]) -> list[list[int]]:
    return [event["samples"] for event in events if event["event"] == "shares"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_a_worker_the_others_share_its_samples(name: str, whole: Any) -> None:
    rng, strategy = random.Random(name), STRATEGIES[name]
    lost = 0
    for _ in range(4):
        rank, at_s = rng.randrange(WORKERS), rng.uniform(0.02, 0.7 * UNTIL_S)
        run, events = run_with(kill_at(f"worker-{rank}", at_s), strategy)
        check(run, strategy, whole)
        gone = next((index for index, event in enumerate(events) if event["event"] == "left"), len(events))
        later = shares_of(events[gone:])
        lost += bool(later)
        assert all(samples[rank] == 0 for samples in later), (rank, at_s, later)
    assert lost > 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_new_process_has_a_share_again(name: str, whole: Any) -> None:
    rng, strategy = random.Random(name), STRATEGIES[name]
    back = 0
    for after_s in (0.0, 0.02, 0.5):
        rank, at_s = rng.randrange(WORKERS), rng.uniform(0.1, 0.5 * UNTIL_S)
        run, events = run_with(replace_at(f"worker-{rank}", at_s, after_s), strategy)
        check(run, strategy, whole)
        joined = [
            index for index, event in enumerate(events) if event["event"] == "joined" and event["epoch"] > 1
        ]
        assert joined
        back += any(samples[rank] for samples in shares_of(events[joined[0] :]))
    assert back > 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_they_die_and_come_back_again_and_again(name: str, whole: Any) -> None:
    strategy = STRATEGIES[name]
    for seed in range(3):
        rng = random.Random(f"{name} {seed}")

        async def script(cluster: Any, rng: random.Random = rng) -> None:
            director = cluster.virtual.runtime("director")
            for _ in range(6):
                await director.sleep(rng.uniform(0.0, 0.5))
                who = f"worker-{rng.randrange(1, WORKERS)}"  # one at least has the parameters
                if cluster.outcomes.keys() & {who}:
                    return  # the run is over
                cluster.kill(who)
                await director.sleep(rng.choice([0.0, 0.003, 0.05, 0.3]))
                await cluster.restart(who)
                await director.sleep(rng.choice([0.0, 0.003, 0.05]))

        run, _ = run_with(script, strategy)
        check(run, strategy, whole)


def test_a_new_process_that_does_not_ask_for_its_share_is_noticed(
    monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    """Planted: it begins with the shares of the beginning."""
    monkeypatch.setattr(ShareReporter, "join_late", lambda self: None)
    wrong = 0
    for seed in range(3):
        try:
            run, _ = run_with(replace_at("worker-1", 0.8 + 0.3 * seed, 0.05), gs.Synchronous())
            check(run, gs.Synchronous(), whole)
        except (AssertionError, gs.errors.GradstreamError):
            wrong += 1
    assert wrong
