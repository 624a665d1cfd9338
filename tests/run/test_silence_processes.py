"""Real processes that are stopped, and machines whose network loses all packets of one direction."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from pathlib import Path
from typing import Literal

import pytest

import gradstream as gs
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.run.result import Run
from kit.machines import Machines, unavailable
from kit.process_faults import Stopper
from machine_command import Command

LEASE_S = 2.0

JOB = f"""
import time
import numpy as np
import gradstream as gs

def gradient(parameters, inputs, targets):
    time.sleep(0.02)
    return {{"w": 2 / len(inputs) * inputs.T @ (inputs @ parameters["w"] - targets)}}

def job():
    model = gs.from_functions(
        init=lambda seed: {{"w": np.zeros(3)}}, outputs=lambda p, x: x @ p["w"], gradients=gradient
    )
    inputs = np.random.default_rng(0).normal(size=(100_000, 3)).astype(np.float32)
    return gs.Job(
        model, gs.from_arrays(inputs, inputs @ np.array([1, 2, 3], np.float32)), strategy="downpour",
        optimizer=gs.optim.SGD(lr=0.01), workers=2, batch_size=8, epochs=1, chunk_elems=64,
        until=gs.until(seconds=4 * {LEASE_S}), checkpoint_every=None, max_restarts=0,
        deadlines=gs.Deadlines(join_s=60, silence_s=10, lease_s={LEASE_S}, coordinator_s=20),
    )
"""


def run_with(folder: Path, node: str, seconds: float, epochs: int | None = None) -> tuple[Run, str, str]:
    """A run in which a node is stopped for so long: the run, its error, and the last words of the node."""
    # It goes on for a lease when the stop is over: who was to be lost is lost by then.
    (folder / "job.py").write_text(JOB.replace("seconds=4 *", f"seconds={seconds / LEASE_S + 1.5} *"))
    job, error = load_job(f"{folder}/job.py:job"), ""
    if epochs is not None:
        job = dataclasses.replace(job, epochs=epochs)
    run_dir = folder / "run"
    run_dir.mkdir()
    with LocalCluster(run_dir / "logs", node_environment(2)) as cluster:
        # Before it, workers learn how much they can do: that decides how much work they have in hand.
        stopper = Stopper(cluster, node, seconds, gap_s=LEASE_S / 2)
        try:
            launch(plan_run(job, "silence"), run_dir, cluster=cluster, on_event=stopper)
        except gs.errors.GradstreamError as raised:
            error = str(raised)
        stopper.check()
        while cluster.running:
            assert cluster.message(60.0) is not None, f"still running: {', '.join(cluster.running)}"
        return Run.load(run_dir), error, cluster.log_tail(node, 1)


def lost(run: Run) -> list[str]:
    return [event["who"] for event in run.events if event["event"] == "left" and event["lost"]]


def test_a_coordinator_that_is_stopped_for_longer_than_the_lease_loses_nobody(tmp_path: Path) -> None:
    run, error, _ = run_with(tmp_path, "coordinator", 1.5 * LEASE_S)
    assert (lost(run), error) == ([], "")
    for rank in range(2):
        at_s = [e["time_s"] for e in run.events if e["event"] == "step" and e["rank"] == rank]
        longest_s = max(map(float.__sub__, at_s[1:], at_s))
        assert longest_s < 1.5 * LEASE_S, "training goes on without it"


def test_a_worker_that_is_stopped_for_less_than_the_lease_stays(tmp_path: Path) -> None:
    run, error, _ = run_with(tmp_path, "worker-1", 0.5 * LEASE_S)
    assert (lost(run), error) == ([], "")


def test_a_worker_that_is_stopped_for_longer_is_lost_alone_and_learns_why(tmp_path: Path) -> None:
    run, error, last = run_with(tmp_path, "worker-1", 2 * LEASE_S)
    assert (lost(run), error) == (["worker-1"], "")
    assert "EvictedError: worker-1 was stopped" in last
    assert f"silent for {LEASE_S:g} s" in last
    (left,) = [event for event in run.events if event["event"] == "left" and event["lost"]]
    assert "stands still" in left["reason"] and "--set deadlines.lease_s=" in left["reason"]


def test_a_shard_that_is_stopped_for_longer_is_blamed_alone(tmp_path: Path) -> None:
    run, error, last = run_with(tmp_path, "shard-0", 2 * LEASE_S)
    assert lost(run) == ["shard-0"]
    assert error.startswith("shard-0: silent for")
    del last  # its process is ended with the run


@pytest.mark.limit_s(180)
def test_one_direction_of_the_network_is_cut(tmp_path: Path) -> None:
    """Each for half of the lease, and then one for longer: tests/run/test_joined_workers.py has the other."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    job = JOB.replace("seconds=4 *", "seconds=8 *")
    with Machines(2) as machines:
        a = machines[0]
        words = ["train", "job.py", "--listen", a.address, "--wait", "2", "--run-dir", "run"]
        words += [
            "--servers-on",
            "launcher",
        ]  # or the run would end with the shard of the machine that is cut off
        launcher = Command(a, tmp_path / "a", *words, job=job)
        joining = shlex.split(launcher.line(r"gradstream (join .*)")[1])
        other = Command(machines[1], tmp_path / "b", *joining, job=job)
        events = tmp_path / "a" / "run" / "events.jsonl"

        def left() -> list[str]:
            lines = events.read_text().splitlines()[:-1] if events.is_file() else []
            return [e["who"] for e in map(json.loads, lines) if e["event"] == "left" and e["lost"]]

        while not (events.is_file() and '"step"' in events.read_text()):
            assert launcher.process.poll() is None, launcher.end()
            time.sleep(0.05)
        directions: tuple[Literal["from", "to"], ...] = ("from", "to")
        for direction in directions:
            with machines.cut(1, direction):
                time.sleep(0.5 * LEASE_S)
            time.sleep(1.25 * LEASE_S)
            assert left() == []
        with machines.cut(1, "to"):
            for _ in range(200):
                if left():
                    break
                time.sleep(0.05)
        assert left() == ["worker-1"]
        status, said = launcher.end()
        assert status == 0, said
        status, said = other.end()
        assert "EvictedError: worker-1 was stopped, or cut off" in said, said


def test_a_cut_that_cuts_nothing_says_so() -> None:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    dropped = pytest.raises(AssertionError, match="no packet was dropped")
    with Machines(1) as machines, dropped, machines.cut(0, "to"):
        pass


def test_a_stop_that_never_came_says_so(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "logs", {}) as cluster:
        stopper = Stopper(cluster, "worker-1", 1.0)
        with pytest.raises(AssertionError, match="no stop"):
            stopper.check()
