"""Runs without servers import nothing of `gradstream.server`: not in a simulation, nor in any node or script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cold  # the tests' warm process has modules of servers

NOTING = """
import os
import sys


def note():
    loaded = sorted(name for name in sys.modules if name.startswith("gradstream.server"))
    with open(os.environ["NOTED"], "a") as file:
        file.write(" ".join(loaded) + "\\n")
"""

JOB = """
import numpy as np
import gradstream as gs
from noting import note


def gradients(parameters, inputs, targets):
    note()
    residual = inputs @ parameters["w"] - targets
    return float(residual @ residual), {"w": residual @ inputs}


def job(strategy="allreduce"):
    inputs = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(4)}, outputs=lambda w, x: x @ w["w"], gradients=gradients
    )
    optimizer = gs.optim.SGD(lr=0.1)
    data = gs.from_arrays(inputs, inputs.sum(1))
    return gs.Job(model, data, strategy=strategy, optimizer=optimizer, workers=2, batch_size=4, steps=2)
"""

SCRIPT = """
import torch
import gradstream as gs
from noting import note

session = gs.join("allreduce")
model = torch.nn.Linear(3, 1)
model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
note()
"""


def noted_by(folder: Path, *command: str) -> set[str]:
    """Runs Python in a folder; returns the modules of servers that its processes have noted, a text of each."""
    (folder / "noting.py").write_text(NOTING)
    (folder / "mine.py").write_text(JOB)
    (folder / "loop.py").write_text(SCRIPT)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "NOTED": str(folder / "noted.txt"), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set((folder / "noted.txt").read_text().splitlines())


@pytest.mark.parametrize("strategy", ["allreduce", "hogwild"])
def test_a_simulation(tmp_path: Path, strategy: str) -> None:
    code = f'import mine, gradstream as gs; gs.simulate(mine.job("{strategy}"))'
    assert noted_by(tmp_path, "-c", code) == {""}


def test_with_servers_they_are_noted(tmp_path: Path) -> None:
    (noted,) = noted_by(tmp_path, "-c", 'import mine, gradstream as gs; gs.simulate(mine.job("downpour"))')
    assert "gradstream.server.shard.node" in noted


def test_the_workers_of_a_job(tmp_path: Path) -> None:
    assert noted_by(tmp_path, "-m", "gradstream", "train", "mine.py") == {""}


def test_a_script_with_its_own_loop(tmp_path: Path) -> None:
    assert noted_by(tmp_path, "-m", "gradstream", "train", "loop.py") == {""}
