"""Reports of workers that died, came back, were asked to go or were only slow, and of what became of the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.testing.runs import (
    NUM_SAMPLES,
    QUICK,
    check_exactly_once,
    count_tokens,
    least_squares,
    replace_at,
)

WORLD = SimulationConfig(costs={"gradient": Cost(base_s=0.05)})
EPOCHS, ROUNDS = 4, 6  # rounds of an epoch
IN_ROUNDS = ["synchronous", "allreduce"]


def linear(**options: Any) -> gs.Run:
    """Sums of small integers, which are exact in any order."""
    model, data = least_squares(4 * 2 * ROUNDS, 64, grid=0.125, reduction="sum")
    given: dict[str, Any] = {
        "optimizer": gs.optim.SGD(lr=2**-8),
        "workers": 4,
        "batch_size": 2,
        "epochs": EPOCHS,
        "chunk_elems": 64,
        "config": WORLD,
        "deadlines": QUICK,
    }
    return simulate(model, data, **{**given, **options})


def lost(run: gs.Run) -> list[str]:
    return [event["who"] for event in run.events if event["event"] == "left" and event["lost"]]


@pytest.mark.parametrize("strategy", IN_ROUNDS)
def test_those_of_a_lost_machine_take_no_others_with_them(strategy: str) -> None:
    """horovod/horovod#3264: where the workers of one machine were killed, sometimes those of the other failed too."""

    async def script(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.52)
        for name in ("worker-2", "worker-3"):
            cluster.kill(name)

    run = linear(strategy=strategy, script=script)
    assert sorted(lost(run)) == ["worker-2", "worker-3"]
    np.testing.assert_array_equal(run.parameters["w"], linear(strategy=strategy).parameters["w"])


@pytest.mark.parametrize("strategy", IN_ROUNDS)
def test_a_new_worker_stops_nobody(strategy: str) -> None:
    """horovod/horovod#2652: a worker that was added hung before its first step, and with it all that trained."""
    whole = linear(strategy=strategy)
    run = linear(strategy=strategy, script=replace_at("worker-1", 0.32, 0.1))
    assert lost(run) == ["worker-1"]
    assert any(row["rank"] == 1 and row["time_s"] > 0.6 for row in run.history)
    np.testing.assert_array_equal(run.parameters["w"], whole.parameters["w"])
    assert run.summary["train_s"] < 1.5 * whole.summary["train_s"]


@pytest.mark.parametrize("strategy", [*IN_ROUNDS, "downpour"])
def test_after_a_worker_has_come_the_epoch_is_still_the_same(strategy: str) -> None:
    """horovod/horovod#2844: after workers were added, training went on in another epoch than it had been in."""
    run = linear(strategy=strategy, script=replace_at("worker-1", 0.4, 0.05))
    ledger = {event["epoch"]: event["samples"] for event in run.events if event["event"] == "ledger"}
    assert ledger == dict.fromkeys(range(EPOCHS), 4 * 2 * ROUNDS)
    steps = [row for row in run.history if row["rank"] == 1]
    assert [row["epoch"] for row in steps] == sorted(row["epoch"] for row in steps)
    if strategy != "downpour":
        assert all(row["epoch"] == row["step"] // ROUNDS for row in run.history)


def test_workers_that_left_when_asked_and_came_back_find_the_others_in_step() -> None:
    """horovod/horovod#3494: after some had left in good order, old and new workers waited for different exchanges."""

    async def script(cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        await director.sleep(0.3)
        for name in ("worker-1", "worker-2"):
            cluster.drain(name)
        for name in ("worker-1", "worker-2"):
            await cluster.ended(name)
        await director.sleep(0.1)
        for name in ("worker-1", "worker-2"):
            await cluster.restart(name)

    run = linear(strategy="allreduce", script=script)
    assert not lost(run)
    assert {row["rank"] for row in run.history if row["time_s"] > 0.8} >= {0, 3}
    np.testing.assert_array_equal(run.parameters["w"], linear(strategy="allreduce").parameters["w"])


def test_who_is_asked_to_go_hands_in_what_it_has_begun() -> None:
    """ray-project/kuberay#5004: a drained machine is treated as a dead one, and work in hand was done from scratch."""

    async def script(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.1)
        cluster.drain("worker-1")

    run = count_tokens(strategy="downpour", epochs=EPOCHS, script=script)
    check_exactly_once(run, NUM_SAMPLES, EPOCHS)
    assert not lost(run)
    assert len(run.history) == EPOCHS * NUM_SAMPLES // 2  # no minibatch was computed twice


@pytest.mark.parametrize("strategy", IN_ROUNDS)
def test_a_slow_worker_is_waited_for_however_long_a_step_takes(strategy: str) -> None:
    """learning-at-home/hivemind#676: a deadline for a round, which one had to guess, dropped whoever was late."""
    step_s = 3 * QUICK.lease_s  # of the slow one; the others take a fortieth of a lease
    config = dataclasses.replace(WORLD, speeds={"worker-2": 0.05 / step_s})
    run = linear(strategy=strategy, config=config, epochs=None, steps=2)
    assert not lost(run)
    assert run.summary["train_s"] == pytest.approx(2 * step_s, rel=0.05)
    whole = linear(strategy=strategy, epochs=None, steps=2)
    np.testing.assert_array_equal(run.parameters["w"], whole.parameters["w"])
