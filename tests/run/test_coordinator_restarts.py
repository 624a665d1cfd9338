"""The coordinator dies at any instant, and a new process goes on: nothing is lost, doubled, or rounded otherwise."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.coordinator.durable import StateStore
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.testing.runs import QUICK, Tokens, check_exactly_once, least_squares, numbered

NUM_SAMPLES, EPOCHS = 24, 3
WORLD = SimulationConfig(
    costs={
        "gradient": Cost(base_s=0.03, jitter=Exponential()),
        "apply": Cost(base_s=1e-3),
        "write": Cost(base_s=1e-3),
    },
    network=Network(link=Link(latency_s=1e-3, jitter_s=1e-3)),
)


class Dies:
    """A script that kills the coordinator at some instants, and starts it again each time after a pause."""

    def __init__(
        self, *kills: tuple[float, float], also: str = "", make: Callable[[str, str], StateStore] = StateStore
    ) -> None:
        self._kills = kills
        self._also = also
        self._make = make

    def store(self, job: str) -> StateStore:
        return self._make(":memory:", job)

    async def __call__(self, cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        for at_s, pause_s in self._kills:
            await director.sleep(at_s)
            cluster.kill("coordinator")
            if self._also:
                cluster.kill(self._also)
                self._also = ""
            await director.sleep(pause_s)
            await cluster.restart("coordinator")


class Forgetful(StateStore):
    """Says that it has stored a transaction, and stores it only with the next one."""

    _late: tuple[Mapping[str, str], bytes, Sequence[str]] | None = None

    def write(self, rows: Mapping[str, str], lines: bytes, gone: Sequence[str] = ()) -> None:
        late, self._late = self._late, (rows, lines, gone)
        if late is not None:
            super().write(*late)

    def rule(self) -> tuple[dict[str, str], bytes]:
        self._late = None
        return super().rule()


def run_tokens(script: Any, seed: int, **options: Any) -> tuple[gs.Run, list[Any]]:
    events: list[Any] = []
    options = {"strategy": "downpour", "workers": 3, "servers": 2, "config": WORLD, **options}
    run = simulate(
        Tokens(num_chunks=3),
        numbered(NUM_SAMPLES),
        optimizer=gs.optim.SGD(lr=1.0),
        batch_size=2,
        epochs=EPOCHS,
        chunk_elems=64,
        seed=seed,
        deadlines=QUICK,
        script=script,
        on_event=events.append,
        **options,
    )
    return run, events


def check_events(run: gs.Run, events: list[Any]) -> None:
    """Every event is there once: the steps of all workers, the ledger, one end."""
    ledger = [event["epoch"] for event in events if event["event"] == "ledger"]
    assert ledger == list(range(EPOCHS))
    assert [event["samples"] for event in events if event["event"] == "finished"] == [EPOCHS * NUM_SAMPLES]
    steps = [(event["node"], event["step"]) for event in events if event["event"] == "step"]
    assert len(steps) == len(set(steps)) == EPOCHS * NUM_SAMPLES // 2
    assert run.summary["samples_accounted"] == EPOCHS * NUM_SAMPLES


def test_it_dies_at_any_instant_of_a_run_without_rounds() -> None:
    for seed in range(8):
        rng = random.Random(seed)
        kills = [(rng.uniform(0.01, 0.25), rng.uniform(0.01, 0.5)) for _ in range(rng.choice((1, 1, 2)))]
        run, events = run_tokens(Dies(*kills), seed)
        check_exactly_once(run, NUM_SAMPLES, EPOCHS)
        check_events(run, events)
        rulings = [event["ruling"] for event in events if event["event"] == "coordinator"]
        assert rulings and rulings == sorted(set(rulings)), (seed, rulings)


@pytest.mark.parametrize("strategy", ["synchronous", "allreduce"])
def test_it_dies_at_any_instant_of_a_run_in_rounds(strategy: str) -> None:
    options = {} if strategy == "allreduce" else {"servers": 2}

    def train(seed: int, script: Any) -> gs.Run:
        model, data = least_squares(48, 40, seed=1, whole=False)
        return simulate(
            model,
            data,
            strategy=strategy,
            workers=3,
            batch_size=4,
            epochs=5,
            seed=seed,
            deadlines=QUICK,
            config=WORLD,
            script=script,
            **options,  # type: ignore[arg-type]
        )

    undisturbed = [train(seed, None) for seed in range(2)]
    for seed in range(6):
        rng, quiet = random.Random(seed), undisturbed[seed % 2]
        disturbed = train(seed % 2, Dies((rng.uniform(0.01, 0.9), rng.uniform(0.01, 0.5))))
        assert np.array_equal(quiet.parameters["w"], disturbed.parameters["w"]), seed
        assert disturbed.summary["samples_accounted"] == 5 * 48


def test_a_worker_dies_with_it() -> None:
    for seed in range(5):
        rng = random.Random(seed)
        script = Dies((rng.uniform(0.02, 0.25), rng.uniform(0.01, 0.5)), also=f"worker-{rng.randrange(3)}")
        _, events = run_tokens(script, seed)
        ledger = [event["samples"] for event in events if event["event"] == "ledger"]
        assert ledger == [NUM_SAMPLES] * EPOCHS, seed


def test_a_store_that_forgets_its_last_transaction_is_found_out() -> None:
    caught = 0
    for seed in range(3):
        rng = random.Random(seed)
        try:
            run, events = run_tokens(Dies((rng.uniform(0.02, 0.25), 0.1), make=Forgetful), seed)
            check_exactly_once(run, NUM_SAMPLES, EPOCHS)
            check_events(run, events)
        except (AssertionError, gs.errors.GradstreamError):
            caught += 1
    assert caught > 1


def test_steps_are_made_while_nobody_coordinates() -> None:
    _, events = run_tokens(Dies((0.08, 1.0)), 3, workers=2)
    begun = next(event for event in events if event["event"] == "coordinator")
    late = [event for event in events if event["event"] == "step" and 0.1 < event["time_s"] < begun["time_s"]]
    assert late


def test_without_a_store_its_death_ends_the_run() -> None:
    class DiesForGood(Dies):
        store = None  # type: ignore[assignment]

        async def __call__(self, cluster: SimulatedCluster) -> None:
            await cluster.virtual.runtime("director").sleep(0.1)
            cluster.kill("coordinator")

    with pytest.raises(gs.errors.PeerLostError, match="coordinator"):
        run_tokens(DiesForGood(), 0)


@pytest.mark.parametrize("seed", range(2))
def test_a_member_that_gives_up_an_attempt_to_come_back_is_not_lost(seed: int) -> None:
    """The new process has to store something before it answers, and takes longer for it than members wait."""
    costs = dict(WORLD.costs)

    class DiesAndIsSlow(Dies):
        async def __call__(self, cluster: SimulatedCluster) -> None:
            costs["write"] = Cost(base_s=0.0)
            await super().__call__(cluster)
            costs["write"] = Cost(base_s=0.6 * QUICK.lease_s)
            await cluster.virtual.runtime("director").sleep(0.1)
            costs["write"] = WORLD.costs["write"]

    world = dataclasses.replace(WORLD, costs=costs)
    run, events = run_tokens(DiesAndIsSlow((0.1, 0.1)), seed, config=world)
    assert [event["who"] for event in events if event["event"] == "left" and event["lost"]] == []
    check_exactly_once(run, NUM_SAMPLES, EPOCHS)
    check_events(run, events)


def test_a_new_process_in_the_place_of_an_awaited_member_is_let_in_at_once() -> None:
    class DiesWithAWorker(Dies):
        async def __call__(self, cluster: SimulatedCluster) -> None:
            await super().__call__(cluster)
            await cluster.restart("worker-1")

    run, events = run_tokens(DiesWithAWorker((0.1, 0.05), also="worker-1"), 0)
    left = next(event for event in events if event["event"] == "left")
    assert (left["who"], left["reason"]) == ("worker-1", "another process has taken its place")
    assert left["time_s"] < 0.15 + QUICK.lease_s / 2
    check_exactly_once(run, NUM_SAMPLES, EPOCHS)
