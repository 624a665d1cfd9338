"""Runs of real processes over TCP: the same bits as over gRPC, whoever is killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
import gradstream._resume  # the name in the face is the function's
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.run.local import LocalCluster, node_environment
from gradstream.run.plan import plan_run
from gradstream.run.result import FINAL_MODEL
from gradstream.testing.killing import Killer

resume_module = sys.modules["gradstream._resume"]

JOB = """
import time
import numpy as np
import gradstream as gs

rng = np.random.default_rng(0)
X = rng.standard_normal((120, 40_000), dtype="float32") / 100
Y = X @ rng.standard_normal(40_000, dtype="float32")

def gradients(p, x, y):
    time.sleep(0.01)  # of arithmetic, so that there is a run to be killed in
    error = x @ p["w"] - y
    return float(error @ error) / len(y), {"w": 2 * error @ x / len(y)}

def job(strategy="synchronous", steps=120, carrier="tcp", connections=1):
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(40_000)}, outputs=lambda p, x: x @ p["w"], gradients=gradients
    )
    return gs.Job(
        model, gs.from_arrays(X, Y), strategy=strategy, workers=2, servers=2, batch_size=8, steps=steps,
        chunk_elems=8192, optimizer=gs.optim.Adam(lr=0.01), checkpoint_every=10, carrier=carrier,
        connections=connections, deadlines=gs.Deadlines(join_s=60, silence_s=10, lease_s=3, retry_s=5),
    )

def over_grpc():
    return job(carrier="grpc")

def over_three():
    return job(connections=3)

def downpour():
    return job("downpour", 100)
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "wide.py"
    path.write_text(JOB)
    return str(path)


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[LocalCluster]:
    """One forkserver for several runs."""
    with LocalCluster(tmp_path / "logs", node_environment(2)) as cluster:
        yield cluster


def train(spec: str, path: Path, cluster: LocalCluster, on_event: Any = None) -> gs.Run:
    path.mkdir()
    job = load_job(spec)
    return launch(plan_run(job, "first"), path, cluster=cluster, on_event=on_event)


@pytest.mark.limit_s(240)
def test_killed_and_resumed_over_tcp_a_run_has_the_bytes_of_one_over_grpc(
    spec: str, tmp_path: Path, warm: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume_module, "launch", partial(launch, cluster=warm))
    reference = train(f"{spec}:over_grpc", tmp_path / "grpc", warm)
    assert reference.summary["carriers"] == {"grpc": 12}  # of each of four nodes to three others
    path = tmp_path / "tcp"
    killer = Killer(warm, "step", 30, "shard-0")
    with pytest.raises(gs.errors.PeerLostError, match="shard-0"):
        train(f"{spec}:over_three", path, warm, killer)
    killer.bury()
    run = gs.resume(path)
    assert run.summary["carriers"] == {"tcp": 12}
    assert run.info["carriers"]["worker-0"]["shard-1"] == "tcp"
    assert (path / FINAL_MODEL).read_bytes() == (tmp_path / "grpc" / FINAL_MODEL).read_bytes()


def test_downpour_over_tcp_goes_on_without_a_worker(spec: str, tmp_path: Path, warm: LocalCluster) -> None:
    run = train(f"{spec}:downpour", tmp_path / "run", warm, Killer(warm, "step", 40, "worker-1"))
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["failed"] is None
