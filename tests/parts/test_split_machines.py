"""A replica whose two processes are on two machines, as network namespaces with TLS.

Skipped with the reason where namespaces cannot be made.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gradstream as gs
from gradstream.job.files import load_job
from kit.machines import Machines, unavailable
from machine_command import Command

JOB = """
import numpy as np
from torch import nn
import gradstream as gs

def net():
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4)).double()

def job():
    rng = np.random.default_rng(5)
    data = gs.from_arrays(rng.standard_normal((256, 20)), rng.integers(0, 4, 256))
    model = gs.from_torch(net, nn.functional.cross_entropy)
    return gs.Job(model, data, strategy="synchronous", workers=1, batch_size=16, epochs=2)
"""


@pytest.fixture
def machines() -> Iterator[Machines]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with Machines(2) as made:
        yield made


@pytest.mark.limit_s(240)
def test_a_replica_on_two_machines_trains_as_one_process(machines: Machines, tmp_path: Path) -> None:
    a, b = machines[0], machines[1]
    arguments = (
        "train",
        "job.py:job",
        "--listen",
        a.address,
        "--wait",
        "2",
        "--workers",
        "1",
        "--split",
        "2",
    )
    launcher = Command(a, tmp_path / "a", *arguments, "--run-dir", "run", job=JOB)
    words = shlex.split(launcher.line(r"gradstream (join .*)")[1])
    joined = Command(b, tmp_path / "b", *words, "--name", "b", job=JOB)
    status, said = joined.end()
    assert status == 0, said
    assert "in as b, with shard-1, part1-0" in said
    status, said = launcher.end()
    assert status == 0, said
    whole = gs.simulate(load_job(f"{tmp_path / 'a' / 'job.py'}:job"))
    run = gs.Run.load(tmp_path / "a" / "run")
    for name, array in whole.parameters.items():
        assert np.abs(run.parameters[name] - array).max() < 1e-12
