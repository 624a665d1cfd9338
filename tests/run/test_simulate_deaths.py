"""Nodes are killed at any instant: the run goes on with every sample accounted for, or ends by name."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from torch import nn

import gradstream as gs
from gradstream.runtime.simulation import Cost
from gradstream.testing.runs import NUM_SAMPLES, QUICK, UNSTEADY, check_exactly_once, count_tokens, kill_at

EPOCHS = 3
LEASE_S = QUICK.lease_s


def run_killing(name: str, seconds: float, seed: int, **options: Any) -> tuple[gs.Run, list[Any]]:
    """A run of tokens in which a node dies; its events are there also when it fails."""
    events: list[Any] = []
    options = {"strategy": gs.Downpour(), "script": kill_at(name, seconds), **options}
    return count_tokens(epochs=EPOCHS, seed=seed, on_event=events.append, **options), events


def lost(events: list[Any]) -> list[str]:
    return [event["who"] for event in events if event["event"] == "left" and event["lost"]]


def failed(events: list[Any]) -> Any:
    (event,) = [event for event in events if event["event"] == "failed"]
    return event


STRATEGIES = (gs.Downpour(overlap=False), gs.Downpour(push_every=2, fetch_every=2), gs.Downpour())


def duties(seconds: float | None, **costs: Cost) -> list[Any]:
    """Events of a run on slow cards; worker 0, which hands out and keeps the parameters, may die."""
    events: list[Any] = []
    run = count_tokens(
        strategy=gs.Downpour(),
        epochs=EPOCHS,
        config=dataclasses.replace(UNSTEADY, costs={**UNSTEADY.costs, **costs}),
        script=None if seconds is None else kill_at("worker-0", seconds),
        on_event=events.append,
    )
    check_exactly_once(run, NUM_SAMPLES, EPOCHS)
    assert seconds is None or lost(events) == ["worker-0"]
    return events


def test_the_next_worker_hands_out_the_parameters_where_the_first_dies_before_it_could() -> None:
    slow = Cost(base_s=1.0)  # worker 0 makes them for a second
    for tenths in (1, 5, 9):
        events = duties(0.1 * tenths, init=slow)
        heirs = {e["node"] for e in events if e["event"] == "memory" and "initial" in e["vectors_bytes"]}
        assert heirs == {"worker-1"}


def test_the_next_worker_keeps_the_parameters_where_the_first_dies_before_it_could() -> None:
    slow = Cost(base_s=1.0)  # whoever writes them takes a second
    (finished,) = [event for event in duties(None, checkpoint=slow) if event["event"] == "finished"]
    began_s = finished["time_s"] - 1.0
    for tenths in (1, 5, 9):
        events = duties(began_s + 0.1 * tenths, checkpoint=slow)
        (late,) = [event for event in events if event["event"] == "finished"]
        assert late["time_s"] > finished["time_s"]  # written again, by another


@pytest.mark.parametrize("lowest", [False, True], ids=["worker-1", "worker-0"])
def test_downpour_survives_a_worker_killed_at_any_time(lowest: bool) -> None:
    rng = random.Random(1)
    reassigned = survivors = 0
    for seed in range(15):
        name, seconds = (
            ("worker-0", rng.uniform(0.1, 0.4)) if lowest else ("worker-1", rng.uniform(0.05, 0.4))
        )
        strategy = STRATEGIES[seed % len(STRATEGIES)]
        run, events = run_killing(name, seconds, seed, strategy=strategy)
        check_exactly_once(run, NUM_SAMPLES, EPOCHS)
        survivors += name not in lost(events)  # it was done already
        reassigned += sum(event["reassigned"] for event in events if event["event"] == "ledger")
    assert survivors < 7
    assert reassigned > 15


def test_checker_of_deaths_notices_what_is_not_redone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: those who go on are told of minibatches to take over, and receipt them unseen."""
    from gradstream.worker.gradient import Differentiator

    original = Differentiator.compute

    def lazy(self: Any, parameters: Any, gradient: Any, report: Any) -> Any:
        result = original(self, parameters, gradient, report)
        if gradient.batch.ref.partition != self._rank:
            gradient.vector.tensor.zero_()
        return result

    monkeypatch.setattr(Differentiator, "compute", lazy)
    run, events = run_killing("worker-1", 0.1, seed=0)
    assert lost(events) == ["worker-1"]
    with pytest.raises(AssertionError, match=r"applied [012] times"):
        check_exactly_once(run, NUM_SAMPLES, EPOCHS)


def test_two_of_three_workers_killed() -> None:
    async def script(cluster: Any) -> None:
        for name in ("worker-2", "worker-0"):
            await cluster.virtual.runtime("director").sleep(0.12)
            cluster.kill(name)

    for seed in range(5):
        events: list[Any] = []
        run = count_tokens(
            strategy="downpour", servers=1, epochs=EPOCHS, seed=seed, script=script, on_event=events.append
        )
        check_exactly_once(run, NUM_SAMPLES, EPOCHS)
        assert lost(events) == ["worker-2", "worker-0"]


def test_last_worker_killed_ends_the_run() -> None:
    with pytest.raises(gs.errors.PeerLostError, match="worker-0"):
        run_killing("worker-0", 0.1, seed=0, workers=1)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("worker-1", gs.AllReduce(sharded=True)),
        ("worker-0", gs.AllReduce(sharded=True, overlap=False)),
        ("shard-1", gs.Synchronous()),
        ("shard-0", gs.Downpour()),
        ("coordinator", gs.Downpour()),
        ("coordinator", gs.Synchronous()),
    ],
    ids=str,
)
def test_death_of_who_is_needed_ends_the_run_and_names_them(name: str, strategy: gs.Strategy) -> None:
    rng = random.Random(name)
    for seed in range(6):
        seconds = rng.uniform(0.0, 0.3)
        events: list[Any] = []
        with pytest.raises(gs.errors.PeerLostError, match=name) as caught:
            count_tokens(
                strategy=strategy,
                servers=None if isinstance(strategy, gs.AllReduce) else 2,
                epochs=EPOCHS,
                seed=seed,
                script=kill_at(name, seconds),
                on_event=events.append,
            )
        assert caught.value.peer == name
        if name != "coordinator":
            event = failed(events)
            assert event["culprit"] == name
            assert event["time_s"] <= seconds + LEASE_S


def test_a_silent_death_is_noticed_within_the_lease() -> None:
    """Nobody is told: the network to and from a worker is cut, and its process lives on."""
    from gradstream.runtime.simulation import Partition

    others = frozenset({"coordinator", "shard-0", "shard-1", "worker-0", "worker-2"})
    one = frozenset({"worker-1"})
    cuts = [Partition(0.15, 1e9, one, others), Partition(0.15, 1e9, others, one)]
    network = dataclasses.replace(UNSTEADY.network, partitions=cuts)
    config = dataclasses.replace(UNSTEADY, network=network)
    for strategy in (gs.Downpour(), gs.Synchronous()):
        events: list[Any] = []
        options: dict[str, Any] = {"strategy": strategy, "epochs": EPOCHS, "on_event": events.append}
        if strategy.survives_worker_loss:
            run = count_tokens(config=config, **options)
            if strategy.partitioning == "rounds":  # a sample counts for its share of a round there
                whole = count_tokens(**options)
                assert np.array_equal(run.parameters["tokens"], whole.parameters["tokens"])
            else:
                check_exactly_once(run, NUM_SAMPLES, EPOCHS)
            assert lost(events) == ["worker-1"]
        else:
            with pytest.raises(gs.errors.GradstreamError, match="worker-1"):
                count_tokens(config=config, **options)
            assert failed(events)["culprit"] == "worker-1"
        left = next(event for event in events if event["event"] in ("left", "failed"))
        assert left["time_s"] <= 0.15 + LEASE_S + 0.1


def test_what_a_worker_raises_before_it_has_joined_is_what_the_run_ends_with() -> None:
    def init() -> None:
        """Takes no seed."""

    data = gs.from_arrays(np.zeros((8, 1)), np.zeros(8))
    model = gs.from_functions(init, lambda p, x: x, lambda p, x, y: p)  # type: ignore[arg-type]
    with pytest.raises(
        gs.errors.UserCodeError, match=r"worker-0: TypeError: .*init\(\) takes 0 positional"
    ) as caught:
        gs.simulate(model, data, workers=2, batch_size=2, epochs=1)
    assert "Traceback" in caught.value.traceback_text
    with pytest.raises(gs.errors.ConfigError, match=r"gradstream\.from_torch\(build, loss\)"):
        gs.simulate(nn.Linear(1, 1), data, epochs=1)


def test_nobody_dies_without_being_killed() -> None:
    run, events = run_killing("worker-1", 1e6, seed=3)
    assert lost(events) == []
    check_exactly_once(run, NUM_SAMPLES, EPOCHS)
