"""The coordinator's process is killed while others train: a new one goes on, and the run ends as it would have."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from whole_runs import same

JOB = """
import time
from pathlib import Path
import numpy as np
import gradstream as gs
from gradstream.testing.runs import least_squares

def job():
    model, data = least_squares(608, 40, seed=1, whole=False, reduction="mean")
    inner = model.gradient
    def gradient(*given, **options):
        if not Path(__file__).with_name("hurry").exists():
            time.sleep(0.4)  # so that the run goes on until all coordinators have been killed
        return inner(*given, **options)
    model.gradient = gradient
    return gs.Job(
        model, data, optimizer=gs.optim.SGD(lr=0.01), workers=2, batch_size=8, epochs=2, chunk_elems=64,
    )
"""


class Killer:
    """Kills the coordinator once workers have made so many steps, and again as many after each new one has begun.

    After the last kill it lets the run hurry.
    """

    def __init__(self, cluster: LocalCluster, kills: int, steps: int, hurry: Path) -> None:
        self._cluster, self._kills, self._each, self._left = cluster, kills, steps, steps
        self._hurry = hurry
        self.rulings: list[int] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "coordinator":
            self.rulings.append(event["ruling"])
            self._left = self._each
        if event["event"] != "step":
            return
        self._left -= 1
        if self._left == 0 and self._kills:
            self._kills -= 1
            os.kill(self._cluster.running["coordinator"], signal.SIGKILL)
            if not self._kills:
                self._hurry.touch()


def train(spec: Path, run_dir: Path, cluster: LocalCluster, strategy: str, on_event: Any = None) -> gs.Run:
    """Trains the job in a new run directory."""
    run_dir.mkdir()
    job = dataclasses.replace(load_job(str(spec)), strategy=strategy)
    return launch(plan_run(job, run_dir.name), run_dir, cluster=cluster, on_event=on_event)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py:job"


@pytest.mark.parametrize("strategy", ["downpour", "allreduce"])
def test_a_killed_coordinator_is_followed_by_another(job: Path, strategy: str, tmp_path: Path) -> None:
    """Rounds through servers, to the bit, are in tests/run/test_detached_runs.py."""
    hurry = tmp_path / "hurry"
    with LocalCluster(tmp_path / "logs", node_environment(2), shards=True) as cluster:
        hurry.touch()
        quiet = train(job, tmp_path / "quiet", cluster, strategy) if strategy != "downpour" else None
        hurry.unlink()
        killer = Killer(cluster, kills=2, steps=6, hurry=hurry)
        run = train(job, tmp_path / "killed", cluster, strategy, killer)
    assert killer.rulings == [2, 3]
    assert run.summary["samples_accounted"] == 1216
    lines = (tmp_path / "killed" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    steps = Counter((event["node"], event["step"]) for event in events if event["event"] == "step")
    assert sum(steps.values()) == 152 and max(steps.values()) == 1
    assert Counter(event["event"] for event in events)["finished"] == 1
    assert not [event for event in events if event["event"] == "left" and event["lost"]]
    if quiet is not None:
        assert same(quiet, run)
    assert np.isfinite(run.parameters["w"]).all()
    assert not list((tmp_path / "killed").glob("coordinator.db*"))


def test_before_training_its_death_ends_the_run(job: Path, tmp_path: Path) -> None:
    def kill() -> None:
        while "coordinator" not in cluster.running and not over.wait(0.01):
            pass  # events come too late: training may have begun by then
        os.kill(cluster.running["coordinator"], signal.SIGKILL)

    over, killer = threading.Event(), threading.Thread(target=kill)
    cluster = LocalCluster(tmp_path / "logs", node_environment(2), shards=True)
    killer.start()
    try:
        with cluster, pytest.raises(gs.errors.GradstreamError, match="coordinator"):
            train(job, tmp_path / "killed", cluster, "downpour")
    finally:
        over.set()
        killer.join()
