"""Loops drawn at random end as in plain torch, or are refused; and what was found by them stays mended."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gradstream as gs
from gradstream.session.gradients import JointGradients
from gradstream.session.session import WorkerSession

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tools"))
drawn: Any = importlib.import_module("drawn.trial")
sys.path.remove(str(REPOSITORY / "tools"))

DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=3, retry_s=5)
SAMPLES = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- drawn loops ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_drawn_loops_end_as_in_plain_torch_or_are_refused(seed: int) -> None:
    total = drawn.Record()
    for _, _, record in drawn.try_loops(2 * seed, 50):
        total.add_all(record)
    assert not total.faults, [f"{fault}: {loop}" for loop, fault in total.faults]
    assert total.loops == 50
    assert total.equal >= 45


def first_fault() -> str:
    """What the first drawn loops have that do not end as in plain torch."""
    for strategy, workers in (("allreduce", 2), ("synchronous", 3)):
        record = drawn.Record()
        drawn.run(drawn.program(7, workers, 20)[:-1], strategy, workers, record)
        for loop, fault in record.faults:
            return f"{fault}: {loop}"
    return ""


def test_a_zero_gradient_where_there_is_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = JointGradients._end

    def planted(self: JointGradients) -> None:
        honest(self)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # weight decay and momentum go on

    assert first_fault() == ""
    monkeypatch.setattr(JointGradients, "_end", planted)
    assert "it was refused" not in first_fault() != ""


def test_workers_that_count_alike_whatever_their_samples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = WorkerSession._taken_samples
    monkeypatch.setattr(WorkerSession, "_taken_samples", lambda self: min(honest(self), 1))
    assert "is off by" in first_fault()


def test_an_optimizer_that_is_not_the_first_workers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = JointGradients.after_step

    def planted(self: JointGradients, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        honest(self, optimizer)
        if self._steps == 3:
            optimizer.param_groups[0]["lr"] *= 1.001  # on every worker: they stay the same

    monkeypatch.setattr(JointGradients, "after_step", planted)
    assert first_fault()


def test_the_tool_says_how_many_it_has_tried(tmp_path: Path) -> None:
    command = [sys.executable, "tools/try_loops.py", "--loops", "10", "--length", "10"]
    done = subprocess.run(
        [*command, "--into", str(tmp_path / "loops.json")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "loops.json").read_text())
    assert record["loops"] == 10
    assert record["faults"] == 0
    assert record["equal"] + sum(record["refused"].values()) == 10
