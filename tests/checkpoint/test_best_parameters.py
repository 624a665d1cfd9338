"""The parameters with the best evaluation are kept as they were evaluated."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream.checkpoint.elsewhere import ElsewhereStorage
from gradstream.checkpoint.format import load_file
from gradstream.checkpoint.manifest import Evaluated
from gradstream.run.result import kept_parameters
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import least_squares
from gradstream.worker.evaluation import Evaluation
from gradstream.worker.evaluator import Evaluator
from gradstream.worker.final_model import BEST_EVALUATION, BEST_MODEL, keep_if_best


def trained(path: Path, **options: Any) -> gs.Run:
    """A regression, whose rate is right for a moment and much too high then."""
    model, _ = least_squares(48, 4)
    rows = np.random.default_rng(0).normal(size=(64, 4))
    targets = rows @ np.arange(4.0)
    data = gs.from_arrays(rows[:48], targets[:48], rows[48:], targets[48:])
    optimizer = gs.optim.SGD(lr=gs.schedules.StepDecay(0.2, every=12, factor=20.0, unit="steps"))
    given: dict[str, Any] = {"strategy": "synchronous", "workers": 2, "batch_size": 8, "epochs": 6}
    given |= {"evaluate_every": 1, "run_dir": path, "processes": False} | options
    return gs.train(model, data, optimizer=optimizer, **given)


@pytest.mark.parametrize("strategy", ["synchronous", "allreduce", "downpour"])
def test_the_best_parameters_are_those_that_were_evaluated(tmp_path: Path, strategy: str) -> None:
    run = trained(tmp_path / "run", strategy=strategy)
    losses = [row["loss"] for row in run.evaluations]
    assert len(losses) > 3 and min(losses) < losses[-1]
    kept = json.loads((tmp_path / "run" / BEST_EVALUATION).read_text())
    assert kept["loss"] == min(losses)
    assert kept_parameters(tmp_path / "run", "best") == tmp_path / "run" / BEST_MODEL
    (weights,) = load_file(tmp_path / "run" / BEST_MODEL).values()
    rows = np.random.default_rng(0).normal(size=(64, 4))
    errors = rows[48:] @ np.asarray(weights) - rows[48:] @ np.arange(4.0)
    assert np.isclose(errors @ errors / 2, kept["loss"]) or np.isclose(np.mean(errors**2), kept["loss"])


@pytest.mark.parametrize(("mode", "best"), [("max", max), ("min", min)])
def test_the_best_is_that_of_the_figure_that_until_monitors(tmp_path: Path, mode: Any, best: Any) -> None:
    """Here the figure is best where the loss is not."""

    def largest(outputs: Any, targets: Any) -> float:
        return float(np.abs(np.asarray(outputs) - np.asarray(targets)).max() - np.asarray(outputs).sum())

    until = gs.until(monitor="largest", mode=mode, patience=1000)
    run = trained(tmp_path / "run", metrics={"largest": largest}, until=until, checkpoint_every=5)
    kept = json.loads((tmp_path / "run" / BEST_EVALUATION).read_text())
    figures = {row["step"]: row["metrics"]["largest"] for row in run.evaluations}
    assert figures[kept["step"]] == best(figures.values())
    folders = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    scores = [json.loads((one / "state.json").read_text())["evaluated"]["score"] for one in folders]
    assert scores and None not in scores


@pytest.mark.parametrize("damage", ["gone", "fifo", "link"])
def test_a_finished_run_without_its_final_parameters_is_not_evaluated_by_older_ones(
    tmp_path: Path, damage: str
) -> None:
    trained(tmp_path / "run", checkpoint_every=1)  # a quick machine makes many rounds meanwhile
    final = tmp_path / "run" / "checkpoints/final/model.safetensors"
    final.unlink()
    if damage == "fifo":
        os.mkfifo(final)
    if damage == "link":
        final.symlink_to("/dev/zero")
    with pytest.raises(gs.errors.ConfigError, match=r"model.safetensors is missing.*finished.*older: step-"):
        kept_parameters(tmp_path / "run")
    assert kept_parameters(tmp_path / "run", "best") == tmp_path / "run" / BEST_MODEL


def test_a_figure_that_is_no_number_is_never_the_best() -> None:
    assert Evaluated(1, None, 2.0, float("nan")).rank < Evaluated(2, None, 3.0, -5.0).rank


def test_without_keep_best_nothing_is_written(tmp_path: Path) -> None:
    trained(tmp_path / "run", keep_best=False)
    assert not (tmp_path / "run" / BEST_MODEL).exists()


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [
        (None, (None, 2.0), True),
        ((None, 2.0), (None, 1.0), True),
        ((None, 1.0), (None, 1.0), False),
        ((None, 1.0), (None, 2.0), False),
        ((0.9, 2.0), (0.8, 1.0), False),
        ((0.8, 1.0), (0.9, 2.0), True),
        (b"{", (0.1, 1.0), True),
        (b'{"step": "x", "accuracy": 1, "loss": 0}', (0.1, 1.0), True),
    ],
)
def test_who_evaluates_next_knows_the_best_of_those_before(before: Any, now: Any, kept: bool) -> None:
    """Another worker, after the first one has died, or a resumed run."""
    storage, (model, _) = MemoryStorage(), least_squares(8, 2)
    if isinstance(before, bytes):
        storage.write(BEST_EVALUATION, before)
    elif before is not None:
        keep_if_best(storage, model, torch.zeros(2, dtype=torch.float64), {}, Evaluated(1, *before))
    keep_if_best(storage, model, torch.ones(2, dtype=torch.float64), {}, Evaluated(2, *now))
    found = json.loads(storage.read(BEST_EVALUATION))
    assert (found["step"] == 2) == kept
    assert storage.read(BEST_MODEL)


def test_a_worker_on_another_machine_keeps_none_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator would refuse what it asks for: as many refusals as evaluations, which end its membership."""
    said: list[Any] = []
    storage = object.__new__(ElsewhereStorage)
    monkeypatch.setattr(ElsewhereStorage, "read", lambda *_: pytest.fail("it has asked the coordinator"))
    evaluator = object.__new__(Evaluator)
    evaluator._runtime = SimpleNamespace(storage=storage, node="worker-1")  # type: ignore[assignment]
    evaluator._member = SimpleNamespace(emit=said.append)  # type: ignore[assignment]
    evaluator._is_told = False
    for step in range(3):
        evaluator._keep_if_best(step, torch.zeros(2), {}, Evaluation(0.5, 1.0, 4))
    assert [one.message[:22] for one in said] == ["worker-1 evaluates now"]
