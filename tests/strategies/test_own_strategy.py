"""The worked example, as its reader has it: a file in a folder somewhere, and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.numpy

from gradstream.testing import check_strategy

JOB = """
import numpy as np

import gradstream as gs


def job():
    x = np.random.default_rng(0).standard_normal((200, 3)).astype("float32")
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(3)},
        outputs=lambda p, x: x @ p["w"],
        gradients=lambda p, x, y: {"w": 2 / len(x) * x.T @ (x @ p["w"] - y)},
    )
    return gs.Job(model, gs.from_arrays(x, x @ np.float32([2, -1, 0.5])), workers=2, batch_size=10, epochs=8)
"""


@pytest.fixture
def folder(tmp_path: Path, repository: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "own_strategy.py").write_text((repository / "examples/own_strategy.py").read_text())
    return tmp_path


def gradstream(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "gradstream", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "GRADSTREAM_DATA"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_trains_with_processes(folder: Path) -> None:
    figures = json.loads(
        gradstream(
            folder, "train", "job.py", "--strategy", "own_strategy.py:Damped",
            "--set", "strategy.power=0.5", "--run-dir", "run", "--json",
        )
    )  # fmt: skip
    assert figures["summary"]["strategy"] == "damped"
    assert figures["summary"]["samples"] == 1600
    (saved,) = (folder / "run/checkpoints").glob("*/model.safetensors")
    assert safetensors.numpy.load_file(saved)["w"].round(1).tolist() == [2.0, -1.0, 0.5]
    settings = (folder / "run/config.toml").read_text()
    assert "own_strategy.py:Damped" in settings
    assert "power = 0.5" in settings


@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    report = check_strategy("own_strategy.py:Damped")
    assert not report.broken
    assert str(report).startswith("Damped(power=1.0)\n")


def test_it_is_short_and_the_one_in_the_documentation(repository: Path) -> None:
    example = (repository / "examples/own_strategy.py").read_text()
    code = example.partition('"""\n\n')[2]
    assert len(example.splitlines()) < 40
    assert f"```python\n{code}```" in (repository / "docs/extend.md").read_text()
