"""Processes that encode what they push, over each carrier: the bits of a simulation, and fewer bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import gradstream as gs
from gradstream.job.files import load_job

JOB = """
import numpy as np
import gradstream as gs

rng = np.random.default_rng(0)
X = rng.standard_normal((48, 3000), dtype="float32") / 50
Y = X @ rng.standard_normal(3000, dtype="float32")

def gradients(p, x, y):
    error = x @ p["w"] - y
    return float(error @ error) / len(y), {"w": 2 * error @ x / len(y)}

def job():
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(3000)}, outputs=lambda p, x: x @ p["w"], gradients=gradients,
    )
    return gs.Job(
        model, gs.from_arrays(X, Y), workers=2, servers=2, batch_size=8, epochs=4, chunk_elems=1024,
        optimizer=gs.optim.SGD(lr=0.05), codec=CODEC, fetch_codec=FETCH,
    )
"""


@pytest.mark.parametrize(
    ("carrier", "codec", "strategy"),
    [
        ("grpc", "'int4'", "synchronous"),
        ("tcp", "gs.codecs.ErrorFeedback(gs.codecs.TopK(0.1))", "synchronous"),
        ("shm", "'qsgd'", "synchronous"),
        ("tcp", "'int4'", "allreduce"),
        ("shm", "'one-bit'", "allreduce"),
    ],
)  # fmt: skip
def test_processes_have_the_bits_of_a_simulation(
    carrier: Literal["grpc", "tcp", "shm"], codec: str, strategy: str, tmp_path: Path
) -> None:
    file = tmp_path / "coded.py"
    file.write_text(JOB.replace("CODEC", codec).replace("FETCH", "None"))
    job = load_job(str(file))
    job = dataclasses.replace(job, strategy=strategy, servers=2 if strategy == "synchronous" else None)
    real = gs.train(job, carrier=carrier, run_dir=tmp_path / "run", checkpoint_every=None)
    simulated = gs.simulate(job)
    assert np.array_equal(real.parameters["w"], simulated.parameters["w"])
    assert real.summary["pushed_bytes"] == simulated.summary["pushed_bytes"]
    assert real.summary["pushed_bytes"] < 24 * 4 * 3000 / 2


@pytest.mark.parametrize("carrier", ["grpc", "tcp", "shm"])
def test_processes_fetch_what_a_simulation_does(
    carrier: Literal["grpc", "tcp", "shm"], tmp_path: Path
) -> None:
    file = tmp_path / "coded.py"
    file.write_text(JOB.replace("CODEC", "'int4'").replace("FETCH", "'int8'"))
    job = load_job(str(file))
    real = gs.train(job, carrier=carrier, run_dir=tmp_path / "run", checkpoint_every=None)
    simulated = gs.simulate(job)
    assert np.array_equal(real.parameters["w"], simulated.parameters["w"])
    assert real.summary["fetched_bytes"] == simulated.summary["fetched_bytes"]
    assert real.summary["fetched_bytes"] < 0.35 * real.summary["whole_fetched_bytes"]
