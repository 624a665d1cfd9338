"""Runs of real processes over shared memory: the same bits as over gRPC, whoever is killed."""

from __future__ import annotations

import random
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
EDGES = {"a": np.zeros(3, "float32"), "w": None, "z": np.zeros(5, "float32")}  # only "w" is aligned

def gradients(p, x, y):
    time.sleep(0.01)
    error = x @ p["w"] - y
    return float(error @ error) / len(y), {**EDGES, "w": 2 * error @ x / len(y)}

def job(strategy="synchronous", steps=120, carrier="shm"):
    model = gs.from_functions(
        init=lambda seed: {**EDGES, "w": np.zeros(40_000)},
        outputs=lambda p, x: x @ p["w"],
        gradients=gradients,
    )
    return gs.Job(
        model, gs.from_arrays(X, Y), strategy=strategy, workers=2, servers=1, batch_size=8, steps=steps,
        chunk_elems=16_384, optimizer=gs.optim.Adam(lr=0.01), checkpoint_every=4, carrier=carrier,
        deadlines=gs.Deadlines(join_s=60, silence_s=10, lease_s=3, retry_s=5),
    )

def over_grpc():
    return job(carrier="grpc")

def downpour():
    return job("downpour", 100)
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "wide.py"
    path.write_text(JOB)
    return path


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
def test_killed_and_resumed_over_shared_memory_a_run_has_the_bytes_of_one_over_grpc(
    job_file: Path, tmp_path: Path, warm: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume_module, "launch", partial(launch, cluster=warm))
    train(f"{job_file}:over_grpc", tmp_path / "grpc", warm)
    path, rng = tmp_path / "shm", random.Random(3)
    go: Any = partial(train, f"{job_file}:job", path, warm)
    for victims in ((), ("shard-0",), ("worker-1",)):
        killer = Killer(warm, "checkpoint", 1, *victims)
        with pytest.raises(gs.errors.PeerLostError):
            go(on_event=killer)
        killer.bury()
        go = partial(gs.resume, path, servers=rng.choice([1, 2]))
    run = go()
    assert run.summary["failed"] is None
    assert run.info["carriers"]["worker-0"]["shard-0"] == "shm"
    assert (path / FINAL_MODEL).read_bytes() == (tmp_path / "grpc" / FINAL_MODEL).read_bytes()


WIDE = """
import numpy as np
import gradstream as gs

ELEMS = 9 << 20

def job(carrier="auto"):
    model = gs.from_functions(
        init=lambda seed: {"w": np.linspace(-1, 1, ELEMS)},
        outputs=lambda p, x: x,
        gradients=lambda p, x, y: (0.0, {"w": p["w"] * x[0, 0]}),
    )
    data = gs.from_arrays(np.array([[0.3], [0.7]]), np.zeros(2))
    return gs.Job(model, data, batch_size=1, steps=3, optimizer=gs.optim.Adam(lr=0.01), carrier=carrier)

def over_tcp():
    return job("tcp")
"""


@pytest.mark.limit_s(240)
def test_a_large_model_goes_in_large_chunks_where_memory_is_shared_with_the_same_bits(
    tmp_path: Path, warm: LocalCluster
) -> None:
    file = tmp_path / "large.py"
    file.write_text(WIDE)
    shm = train(f"{file}:job", tmp_path / "shm", warm)
    tcp = train(f"{file}:over_tcp", tmp_path / "tcp", warm)
    assert ([*shm.summary["carriers"]], shm.summary["chunk_elems"]) == (["shm"], 524_288)
    assert ([*tcp.summary["carriers"]], tcp.summary["chunk_elems"]) == (["tcp"], 262_144)
    assert "# chunk_elems: automatic" in (tmp_path / "shm" / "config.toml").read_text()
    assert shm.parameters["w"].tobytes() == tcp.parameters["w"].tobytes()


def test_downpour_over_shared_memory_goes_on_without_a_worker(
    job_file: Path, tmp_path: Path, warm: LocalCluster
) -> None:
    killer = Killer(warm, "step", 40, "worker-1")
    run = train(f"{job_file}:downpour", tmp_path / "run", warm, killer)
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["failed"] is None
