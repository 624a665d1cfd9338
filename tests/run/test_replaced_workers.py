"""A worker is killed, and a new process takes its place while the others train."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.coordinator.lifecycle import LossTolerance
from gradstream.job.files import load_job
from gradstream.model.buffers import buffers_of
from gradstream.run.failures import EndedNodes
from gradstream.run.restarts import (
    CALM_S,
    FIRST_WAIT_S,
    MOST_WAIT_S,
    RESCUE_S,
    STILL_S,
    Comebacks,
    Restarts,
    Succession,
)
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import (
    NUM_SAMPLES,
    QUICK,
    UNSTEADY,
    check_exactly_once,
    count_tokens,
    kill_at,
    least_squares,
    replace_at,
)
from gradstream.worker.buffer_averager import BufferAverager

EPOCHS = 6


def replaced(
    strategy: gs.Strategy, seed: int, name: str, at_s: float, after_s: float, **options: Any
) -> tuple[gs.Run, list[Any], int]:
    """A run in which a worker is replaced; its events, and the steps that the newcomer has made."""
    events: list[Any] = []
    script = replace_at(name, at_s, after_s)
    run = count_tokens(
        strategy=strategy, epochs=EPOCHS, seed=seed, script=script, on_event=events.append, **options
    )
    return run, events, newcomers_steps(events, name)


def newcomers_steps(events: list[Any], name: str) -> int:
    back_s = [e["time_s"] for e in events if e["event"] == "joined" and e["epoch"] > 1]
    mine = [e for e in events if e["event"] == "step" and e["node"] == name]
    return sum(bool(back_s) and e["time_s"] > back_s[0] for e in mine)


@pytest.mark.parametrize(
    "strategy",
    [
        gs.Downpour(),
        gs.Downpour(push_every=2, fetch_every=2, overlap=False),
        gs.SSP(bound=2),
        gs.SSP(bound=0),
        gs.strategies.AsySG(gradients=2),
    ],
    ids=str,
)
def test_a_worker_is_replaced_at_any_instant(strategy: gs.Strategy) -> None:
    """Nothing is lost, also where the new process is there before anybody has heard of the death."""
    rng, made = random.Random(str(strategy)), 0
    for seed in range(2):
        name, after_s = rng.choice(["worker-0", "worker-1"]), rng.choice([0.0, 1e-3, 0.02, 0.1])
        run, events, steps = replaced(strategy, seed, name, rng.uniform(0.05, 0.5), after_s)
        check_exactly_once(run, NUM_SAMPLES, EPOCHS)
        assert [e["epoch"] for e in events if e["event"] in ("left", "joined") and e["epoch"] > 1][:2] != []
        made += steps
    assert made > 4


@pytest.mark.parametrize(
    "strategy",
    [
        gs.Softsync(),
        gs.strategies.StalenessAware(),
        gs.strategies.DCASGD(),
        gs.ElasticAveraging(every=2),
        gs.ElasticAveraging(every=2, synchronous=True),
        gs.ParameterAveraging(every=2),
        gs.ParameterAveraging(every=2, state="averaged"),
        gs.DiLoCo(every=2),
        gs.StreamingDiLoCo(every=4, fragments=2),
        gs.LocalSGD(every=2),
    ],
    ids=str,
)
def test_the_run_ends_with_its_result(strategy: gs.Strategy) -> None:
    """Where updates cannot be counted: every minibatch has a receipt, and the loss is that of a run without a death."""
    model, data = least_squares(96, 4, whole=False, reduction="mean")
    options: dict[str, Any] = {
        "optimizer": gs.optim.SGD(lr=0.05), "strategy": strategy, "workers": 3, "batch_size": 4, "epochs": 3,
        "config": UNSTEADY, "deadlines": QUICK,
    }  # fmt: skip
    x, y = torch.as_tensor(data.inputs), torch.as_tensor(data.targets)

    def loss(run: gs.Run) -> float:
        return float(((x @ torch.as_tensor(run.parameters["w"]) - y) ** 2).mean())

    alone = loss(gs.simulate(model, data, **options))
    events: list[Any] = []
    script = replace_at("worker-0", 0.3, 0.05)
    run = simulate(model, data, **options, script=script, on_event=events.append)
    assert run.summary["samples_accounted"] == 3 * 96
    assert newcomers_steps(events, "worker-0") > 3
    assert loss(run) < 1.5 * alone + 0.01


def test_a_newcomer_takes_the_others_buffers_and_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its BatchNorm begins with the statistics of those who have trained, and not with 0 and 1."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

    rng = np.random.default_rng(0)
    data = gs.from_arrays(rng.normal(3.0, 1.0, (96, 4)).astype("float32"), rng.integers(0, 2, 96))
    began: list[float] = []

    async def adopt(self: BufferAverager) -> None:
        await original(self)
        began.append(float(buffers_of(self._model)["1.running_var"].sum()))

    original = BufferAverager.adopt
    monkeypatch.setattr(BufferAverager, "adopt", adopt)
    options: dict[str, Any] = {
        "strategy": "downpour", "workers": 3, "batch_size": 8, "epochs": 8, "config": UNSTEADY, "deadlines": QUICK,
    }  # fmt: skip
    model = gs.from_torch(build, loss=nn.CrossEntropyLoss())
    simulate(model, data, **options, script=replace_at("worker-0", 0.5, 0.05))
    assert len(began) == 1
    assert began[0] != 3.0  # the sum of three variances of 1, which a new module has


def test_two_workers_of_three_are_replaced_again_and_again() -> None:
    async def script(cluster: Any) -> None:
        director = cluster.virtual.runtime("director")
        for name in ("worker-0", "worker-1", "worker-0", "worker-1"):
            await director.sleep(0.11)
            cluster.kill(name)
            await director.sleep(0.02)
            await cluster.restart(name)

    for seed in range(2):
        run = count_tokens(strategy="downpour", servers=1, epochs=EPOCHS, seed=seed, script=script)
        check_exactly_once(run, NUM_SAMPLES, EPOCHS)
        assert len(run.summary["workers_lost"]) == 4


@pytest.mark.parametrize("at_s", [0.0, 0.001, 0.004, 0.01, 0.03])
def test_at_the_beginning_it_waits_for_the_first_parameters(at_s: float) -> None:
    """Worker 0 hands them out; where it dies before that, the next one does, and the newcomer does not."""
    slow = SimulationConfig(costs={**UNSTEADY.costs, "init": Cost(base_s=0.05)}, network=UNSTEADY.network)
    script = replace_at("worker-0", 0.03 + at_s, 1e-3)
    run = count_tokens(strategy="downpour", epochs=2, config=slow, script=script)
    check_exactly_once(run, NUM_SAMPLES, 2)


def test_during_a_snapshot_it_waits() -> None:
    """Checkpoints are made all the time; a death in one ends it, and the newcomer enters between two."""
    for seed in range(3):
        run, events, _ = replaced(
            gs.Downpour(),
            seed,
            "worker-1",
            0.1 + 0.04 * seed,
            0.01,
            checkpoint_every=2,
            storage=MemoryStorage(),
        )
        check_exactly_once(run, NUM_SAMPLES, EPOCHS)
        assert any(e["event"] == "checkpoint" for e in events)


def test_a_strategy_that_needs_every_worker_takes_in_nobody() -> None:
    model, data = least_squares(96, 4)
    with pytest.raises(gs.errors.PeerLostError, match="worker-1"):
        simulate(
            model, data, strategy=gs.AllReduce(sharded=True), workers=3, batch_size=4, epochs=8, config=UNSTEADY,
            deadlines=QUICK, script=kill_at("worker-1", 0.2),
        )  # fmt: skip


# ---- workers that are asked to go -------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        gs.Downpour(),
        gs.Downpour(push_every=3, fetch_every=3),
        gs.SSP(bound=1),
        gs.SSP(bound=0),
        gs.strategies.AsySG(gradients=2),
    ],
    ids=str,
)
def test_a_worker_that_is_asked_to_go_hands_in_all_and_each_sample_counts_once(strategy: gs.Strategy) -> None:
    """Also where its place is taken again at once, and where it has nothing to do."""
    rng = random.Random(str(strategy))
    for seed in range(2):
        name, at_s, back = rng.choice(["worker-0", "worker-1"]), rng.uniform(0.05, 0.6), seed % 2 == 0

        async def script(cluster: Any, name: str = name, at_s: float = at_s, back: bool = back) -> None:
            director = cluster.virtual.runtime("director")
            await director.sleep(at_s)
            cluster.drain(name)
            while back and name not in cluster.outcomes:
                await director.sleep(1e-3)
            if back and cluster.outcomes[name] is not None:
                await cluster.restart(name)

        events: list[Any] = []
        run = count_tokens(strategy=strategy, epochs=EPOCHS, seed=seed, script=script, on_event=events.append)
        check_exactly_once(run, NUM_SAMPLES, EPOCHS)
        assert run.summary["workers_lost"] == []
        left = [e for e in events if e["event"] == "left" and e["reason"]]
        assert [(e["who"], e["reason"]) for e in left] == [(name, "it was asked to go")]


def test_what_a_newcomer_reports_has_the_time_of_the_run() -> None:
    _, events, _ = replaced(gs.Downpour(), 0, "worker-1", 0.3, 0.05)
    (back_s,) = [e["time_s"] for e in events if e["event"] == "joined" and e["epoch"] > 1]
    made = [e["time_s"] for e in events if e["event"] == "step" and e["node"] == "worker-1"]
    assert made == sorted(made) and made[-1] > back_s


def test_a_worker_whose_coordinator_dies_while_it_joins_is_started_again() -> None:
    ended = EndedNodes()
    ended.statuses["worker-1"] = 1
    ended.report("worker-1", {"error": "PeerLostError", "message": "coordinator: the connection was lost"})
    assert ended.was_lost("worker-1")
    ended.report("worker-1", {"error": "PeerLostError", "message": "shard-0: the connection was lost"})
    assert not ended.was_lost("worker-1")


def test_a_worker_that_was_killed_on_a_machine_that_has_joined_was_lost() -> None:
    """Its machine reports the end of its log with it; one that has ended by itself with such an error was not."""
    ended = EndedNodes()
    ended.report("worker-1", {"error": "PeerLostError", "message": "its process on b was killed by signal 9"})
    ended.statuses["worker-1"] = -signal.SIGKILL
    assert ended.was_lost("worker-1")
    ended.statuses["worker-1"] = 1
    assert not ended.was_lost("worker-1")


@pytest.mark.parametrize(("status", "says"), [(0, True), (1, False)])
def test_a_script_that_ends_without_an_error_is_told_what_joins(status: int, says: bool) -> None:
    ended = EndedNodes()
    ended.statuses["worker-1"] = status
    error = ended.error_of("worker-1", lambda name, lines: "its log")
    assert ("session.wrap" in str(error)) is says


# ---- the launcher -----------------------------------------------------------------------


def test_restarts_are_at_once_and_then_wait_longer() -> None:
    restarts = Restarts(limit=20)
    assert restarts.ended("worker-1", 10.0)
    assert restarts.take_due(10.0) == ["worker-1"]
    assert restarts.take_due(99.0) == []
    waits, now_s = [], 11.0
    for _ in range(9):
        restarts.ended("worker-1", now_s)
        waited = next(
            w
            for w in (FIRST_WAIT_S * 2**k for k in range(9))
            if restarts.take_due(now_s + min(w, MOST_WAIT_S))
        )
        waits.append(min(waited, MOST_WAIT_S))
        now_s += waits[-1] + 1.0
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    now_s += CALM_S  # it has worked for long since
    restarts.ended("worker-1", now_s)
    assert restarts.take_due(now_s) == ["worker-1"]


def test_restarts_have_a_limit() -> None:
    restarts = Restarts(limit=1)
    assert restarts.ended("worker-1", 0.0)
    assert restarts.take_due(0.0) == ["worker-1"]
    assert not restarts.ended("worker-1", 100.0)
    assert restarts.ended("worker-2", 100.0)
    assert not Restarts(0).ended("worker-1", 0.0)


def test_a_shard_that_stands_still_has_to_end_first_and_one_of_whom_nobody_hears_is_told() -> None:
    comebacks = Comebacks(
        LossTolerance(survives_worker_loss=True, obstacle="", acknowledge="replicated"), 9, Succession(True)
    )
    for died_first in (False, True):  # the launcher hears of the end after the run has counted it, or before
        if died_first:
            comebacks.ended("shard-0")
        assert comebacks.lost("shard-0", 1.0) is not died_first
        if not died_first:
            comebacks.ended("shard-0")
        assert comebacks.unheard(1.0 + 2 * RESCUE_S) == []
    assert comebacks.lost("shard-1", 10.0)
    assert comebacks.unheard(10.0 + RESCUE_S / 2) == []
    assert comebacks.unheard(10.0 + 2 * RESCUE_S) == ["shard-1"]
    comebacks.start_soon("shard-1", 20.0)
    comebacks.start_soon("worker-1", 20.0)
    comebacks.stopping = True  # then the others still need the shard
    assert comebacks.due(20.0) == ["shard-1"]


def test_a_lost_worker_that_stands_still_has_to_end_but_one_that_ends_by_itself_may() -> None:
    comebacks = Comebacks(LossTolerance(survives_worker_loss=True, obstacle=""), 9, Succession(True))
    assert not comebacks.lost("worker-1", 1.0)
    assert comebacks.stand_still(1.0 + STILL_S / 2) == []  # it may still say why it ends
    assert comebacks.stand_still(1.0 + 2 * STILL_S) == ["worker-1"]
    comebacks.ended("worker-1")
    assert comebacks.stand_still(1.0 + 3 * STILL_S) == []
    comebacks.ended("worker-2")
    assert not comebacks.lost("worker-2", 10.0)
    assert comebacks.stand_still(10.0 + 2 * STILL_S) == []


def test_without_backups_no_shard_comes_back() -> None:
    comebacks = Comebacks(LossTolerance(survives_worker_loss=True, obstacle=""), 9, Succession(True))
    assert not comebacks.lost("shard-0", 0.0)
    comebacks.start_soon("shard-0", 0.0)
    comebacks.start_soon("worker-0", 0.0)
    assert comebacks.due(0.0) == ["worker-0"]


JOB = """
import gradstream as gs
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import slow

def job():
    model, data = slow(4000, pause_s=0.005)
    return gs.Job(
        model, data, strategy="downpour", optimizer=gs.optim.SGD(lr=1e-7), workers=3, batch_size=10, epochs=100,
        until=gs.until(seconds=60), deadlines=gs.Deadlines(lease_s=1.0),
    )
"""


@pytest.mark.parametrize(
    ("number", "wakes"),
    [(signal.SIGKILL, False), (signal.SIGSTOP, True), (signal.SIGSTOP, False)],
    ids=["killed", "stopped", "stopped for good"],
)
def test_the_launcher_starts_a_lost_worker_again(number: int, wakes: bool, tmp_path: Path) -> None:
    """One that was killed, and one that was stopped for longer than its lease."""
    (tmp_path / "job.py").write_text(JOB)
    log = tmp_path / "run" / "logs" / "worker-1.log"
    told: list[str] = []
    steps = 0

    def pid() -> int:
        return int(re.findall(r"worker-1: pid (\d+)", log.read_text())[-1])

    def on_event(event: Mapping[str, Any]) -> None:
        nonlocal steps
        if event["event"] == "step" and event["node"] == "worker-1":
            steps += 1
            if steps == 5:
                told.append("struck")
                os.kill(pid(), number)
        if event["event"] == "left" and event["lost"]:
            told.append(f"lost {event['who']}")
            if wakes:
                os.kill(pid(), signal.SIGCONT)
        if event["event"] == "joined" and event["epoch"] > 1:
            told.append(f"back {event['who']}")
            steps = 100
        if event["event"] == "step" and steps == 105:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, gs.errors.Interrupted)):
        gs.train(load_job(f"{tmp_path / 'job.py'}:job"), run_dir=tmp_path / "run", on_event=on_event)
    assert told == ["struck", "lost worker-1", "back worker-1"]


def test_sigterm_lets_a_worker_hand_in_its_last_gradient(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB.replace("epochs=100", "epochs=1").replace("slow(4000", "slow(1800"))
    log = tmp_path / "run" / "logs" / "worker-1.log"
    struck: list[int] = []

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["node"] == "worker-1" and not struck:
            struck.append(int(re.findall(r"worker-1: pid (\d+)", log.read_text())[-1]))
            os.kill(struck[0], signal.SIGTERM)

    run = gs.train(load_job(f"{tmp_path / 'job.py'}:job"), run_dir=tmp_path / "run", on_event=on_event)
    assert run.summary["samples_accounted"] == 1800
    assert run.summary["workers_lost"] == []
    left = [event for event in run.events if event["event"] == "left" and event["reason"]]
    assert [(event["who"], event["reason"]) for event in left] == [("worker-1", "it was asked to go")]
