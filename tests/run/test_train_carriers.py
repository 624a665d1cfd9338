"""Runs of real processes over shared memory and over TCP: the bits of a run over gRPC, whichever node dies."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
import gradstream._resume  # the name in the face is the function's
from gradstream._train import launch
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.result import FINAL_MODEL
from killing import Killer
from whole_runs import train

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
    time.sleep(0.01)  # of arithmetic, so that there is a run to be killed in
    error = x @ p["w"] - y
    return float(error @ error) / len(y), {**EDGES, "w": 2 * error @ x / len(y)}

def job(carrier, strategy="synchronous"):
    model = gs.from_functions(
        init=lambda seed: {**EDGES, "w": np.zeros(40_000)},
        outputs=lambda p, x: x @ p["w"],
        gradients=gradients,
    )
    return gs.Job(
        model, gs.from_arrays(X, Y), strategy=strategy, workers=2, servers=2, batch_size=8, steps=48,
        chunk_elems=8192, optimizer=gs.optim.Adam(lr=0.01), checkpoint_every=4, carrier=carrier,
        connections=3 if carrier == "tcp" else 1,
        deadlines=gs.Deadlines(join_s=60, silence_s=10, lease_s=3, retry_s=5),
    )

def grpc():
    return job("grpc")

def shm():
    return job("shm")

def tcp():
    return job("tcp")

def shm_downpour():
    return job("shm", "downpour")

def tcp_downpour():
    return job("tcp", "downpour")
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One forkserver for all runs."""
    with LocalCluster(tmp_path_factory.mktemp("logs"), node_environment(2)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "wide.py"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="module")
def over_grpc(job_file: Path, tmp_path_factory: pytest.TempPathFactory, warm: LocalCluster) -> bytes:
    """The final model of a run over gRPC that nothing interrupts."""
    path = tmp_path_factory.mktemp("grpc") / "run"
    run = train(f"{job_file}:grpc", path, warm)
    assert run.summary["carriers"] == {"grpc": 12}  # of each of four nodes to three others
    return (path / FINAL_MODEL).read_bytes()


@pytest.mark.parametrize(
    ("carrier", "deaths"),
    [("shm", [(), ("shard-0",)]), ("tcp", [("shard-0",)])],
    ids=["shm", "tcp"],
)
def test_killed_and_resumed_a_run_has_the_bytes_of_one_over_grpc(
    carrier: str,
    deaths: Sequence[Sequence[str]],
    over_grpc: bytes,
    job_file: Path,
    tmp_path: Path,
    warm: LocalCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed behind its first checkpoint: all of its nodes, or one. The last run ends."""
    monkeypatch.setattr(resume_module, "launch", partial(launch, cluster=warm))
    path, rng = tmp_path / "run", random.Random(3)
    go: Any = partial(train, f"{job_file}:{carrier}", path, warm)
    for victims in deaths:
        killer = Killer(warm, "checkpoint", 1, *victims)
        with pytest.raises(gs.errors.PeerLostError, match="|".join(victims) or None):
            go(on_event=killer)
        killer.bury()
        go = partial(gs.resume, path, servers=rng.choice([1, 2]))
    run = go()
    assert run.summary["failed"] is None
    assert [*run.summary["carriers"]] == [carrier]
    assert run.info["carriers"]["worker-0"]["shard-0"] == carrier
    assert (path / FINAL_MODEL).read_bytes() == over_grpc


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
def test_downpour_goes_on_without_a_worker(
    carrier: str, job_file: Path, tmp_path: Path, warm: LocalCluster
) -> None:
    killer = Killer(warm, "step", 16, "worker-1")
    run = train(f"{job_file}:{carrier}_downpour", tmp_path / "run", warm, on_event=killer)
    killer.bury()
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["failed"] is None


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
    return gs.Job(model, data, batch_size=1, steps=2, optimizer=gs.optim.Adam(lr=0.01), carrier=carrier)

def over_tcp():
    return job("tcp")
"""


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
