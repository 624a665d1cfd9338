"""Uneven machines for real: processes of which one has little of a core, or dies."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradstream.job.files import load_job
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.telemetry.events import EventDict
from kit.machines import CpuQuota, no_quota
from whole_runs import train

JOB = """
import gradstream as gs
from gradstream.testing.runs import least_squares

def busy():
    model, data = least_squares(4096, 2000, grid=2.0**-10)
    inner = model.gradient

    def gradient(parameters, batch, into, **options):
        for _ in range(24):  # arithmetic in proportion to the samples
            batch.inputs @ batch.inputs.T[:, :8]
        return inner(parameters, batch, into, **options)

    model.gradient = gradient
    return gs.Job(
        model, data, workers=2, batch_size=128, steps=48, shares="measured", optimizer=gs.optim.SGD(lr=2.0**-9)
    )

def backed():
    model, data = least_squares(624, 300, grid=2.0**-10)
    return gs.Job(
        model, data, workers=3, servers=2, batch_size=8, steps=160, chunk_elems=64,
        strategy=gs.Synchronous(backup=1), optimizer=gs.optim.SGD(lr=2.0**-9),
    )
"""


class SlowedDown(LocalCluster):
    """One of its processes has a part of a core only, from its beginning."""

    victim = "worker-1"

    def __init__(self, logs: Path, quota: CpuQuota) -> None:
        super().__init__(logs, node_environment(2))
        self._quota = quota

    def message(self, timeout_s: float) -> dict[str, Any] | None:
        message = super().message(timeout_s)
        if message is not None and message.get("started") == self.victim:
            self._quota.put(message["pid"])
        return message


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "uneven.py"
    path.write_text(textwrap.dedent(JOB))
    return path


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "logs", node_environment(2)) as cluster:
        yield cluster


def test_a_worker_with_little_cpu_gets_the_smaller_share(job_file: Path) -> None:
    """Also where others are busy: they take from both workers, and this one has a tenth of a core at most."""
    if reason := no_quota():
        pytest.skip(f"no worker can be slowed down: {reason}")
    with CpuQuota(0.1) as little, SlowedDown(job_file.parent / "logs", little) as cluster:
        found = train(f"{job_file}:busy", job_file.parent / "busy", cluster)
    shares = [event["samples"] for event in found.events if event["event"] == "shares"]
    assert shares[-1][1] < 0.85 * shares[-1][0], shares
    assert found.summary["samples_accounted"] == 48 * 256


def test_a_worker_that_is_killed_is_in_whole_updates_or_in_none(
    job_file: Path, cluster: LocalCluster
) -> None:
    left = 15

    def kill(event: EventDict) -> None:
        nonlocal left
        left -= event["event"] == "step" and event["rank"] == 2
        if left == 0:
            left = -1
            cluster.signal("worker-2", signal.SIGKILL)

    found = train(f"{job_file}:backed", job_file.parent / "backed", cluster, on_event=kill)
    rounds = [event for event in found.events if event["event"] == "round"]
    assert found.summary["workers_lost"] == ["worker-2"]
    assert [event["round"] for event in rounds] == list(range(160))
    assert any(2 in event["accepted"] for event in rounds[:30])
    assert rounds[-1]["left_out"] == [2]
    assert all(len(event["ids"]) == 16 for event in rounds)
    job = load_job(f"{job_file}:backed")
    model: Any = job.model
    w = torch.zeros(300, dtype=torch.float64)
    gradient = torch.zeros_like(w)
    for event in rounds:
        batch = job.data.batch(np.array(event["ids"]))
        model.gradient(w, batch, gradient, seed=0, report=lambda _: None)
        w.add_(gradient.mul_(1 / 16), alpha=-(2.0**-9))
    assert found.parameters["w"].tobytes() == w.numpy().tobytes()
