"""Arguments of a job file or a script: every node reads it with those that its launcher had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gradstream as gs
from gradstream.cli.group import main
from gradstream.run.result import job_of_run, spec_of_run
from small_loops import SETUP

SCRIPT = """
import argparse
import numpy as np
import gradstream as gs

parser = argparse.ArgumentParser()
parser.add_argument("--slope", type=float, default=1.0)
slope = parser.parse_args().slope
x = np.random.default_rng(0).standard_normal((64, 1)).astype("float32")
model = gs.from_functions(
    lambda seed: {"w": np.zeros(1)},
    lambda p, x: x @ p["w"],
    lambda p, x, y: {"w": 2 / len(x) * x.T @ (x @ p["w"] - slope * x[:, 0])},
)
options = dict(run_dir="run", optimizer=gs.optim.SGD(lr=0.3), batch_size=8, epochs=4)
gs.train(model, gs.from_arrays(x, slope * x[:, 0]), **options)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "script.py").write_text(text)
        return "script.py"

    return write


def train(*words: str) -> None:
    done = CliRunner().invoke(main, ["train", *words])
    assert done.exit_code == 0, done.output


def slope_of_run() -> float:
    run = gs.Run.load("run")
    assert run.parameters is not None
    return float(run.parameters["w"].item())


def test_nodes_find_the_arguments_of_the_script_and_so_does_resume(script: Callable[[str], str]) -> None:
    source = str(Path(gs.__file__).parents[1])
    subprocess.run(
        [sys.executable, script(SCRIPT), "--slope", "3"],
        env={**os.environ, "PYTHONPATH": source},
        check=True,
        timeout=100,
    )
    assert slope_of_run() == pytest.approx(3, abs=0.1)
    assert spec_of_run(Path("run")).argv == ["script.py", "--slope", "3"]
    data: Any = job_of_run(Path("run")).data
    np.testing.assert_allclose(data.targets, 3 * data.inputs[:, 0])


def test_the_command_line_passes_arguments_on(script: Callable[[str], str]) -> None:
    train(script(SCRIPT), "--workers", "1", "--", "--slope", "-2")
    assert slope_of_run() == pytest.approx(-2, abs=0.1)
    refused = CliRunner().invoke(main, ["train", "script.py", "--slope", "2"])
    assert refused.exit_code == 2 and "--slope" in refused.output  # without --, it is ours


def test_a_loop_of_its_own_finds_them_too(script: Callable[[str], str]) -> None:
    told = "import json, pathlib, sys\n"
    told += "pathlib.Path(f'argv-{session.rank}').write_text(json.dumps(sys.argv[1:]))\nsession.close()\n"
    train(script(SETUP + told), "--workers", "2", "--run-dir", "run", "--", "--hidden", "64")
    assert [json.loads(Path(f"argv-{rank}").read_text()) for rank in (0, 1)] == [["--hidden", "64"]] * 2
