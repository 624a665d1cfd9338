"""The study of large batches: what is due follows from what is there, and its figures are those of known problems."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs

Modules = Any


@pytest.fixture
def study(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Modules:
    """The package studies/large_batch_study/large_batch."""
    for folder in ("bench", "studies/large_batch_study"):
        monkeypatch.syspath_prepend(str(repository / folder))
    for name in ("critical", "ledger", "minima", "page", "plots", "saddles"):
        importlib.import_module(f"large_batch.{name}")
    return importlib.import_module("large_batch")


def worked_off(study: Modules, scale: Any, accuracy: Any) -> dict[Any, Any]:
    """All runs of minima, in the order in which they come due."""
    rows: dict[Any, Any] = {}
    while key := next((one for one in study.minima.due(rows, scale) if one not in rows), None):
        row = {"accuracy": accuracy(key), "failed": False, "loss": 0.1, "updates": 7, "cpu_s": 1.0}
        row |= {"sharpness": dict.fromkeys(study.minima.BOXES, 2.0), "at": [0.0, 1.0], "losses": [0.1, 0.2]}
        rows[key] = row | key._asdict()
    return rows


def test_rates_are_chosen_by_held_out_images_then_come_all_seeds(study: Modules) -> None:
    scale = study.ledger.Scale(models=("dense",), batches=(128, 512))
    best = {"plain": 0.03, "sgd": 0.1, "lars": 3.0, "lamb": 0.1}
    # On the images that are reported another rate would be the best one.
    rows = worked_off(
        study,
        scale,
        lambda key: 70.0 + key.seed if key.lr == best.get(key.case, 0.03) else 50.0,
    )
    figures = study.minima.found(rows, scale)
    by_method = figures["batch"]["dense"]["512"]
    assert {method: one["rate"] for method, one in by_method.items()} == best | dict.fromkeys(
        ("linear", "longer"), 0.03
    )
    assert by_method["plain"]["accuracy"] == [73.0, 1.58]
    assert by_method["lamb"]["at_edge"] and not by_method["lars"]["at_edge"]
    assert set(figures["batch"]["dense"]["128"]) == {
        "plain",
        "lars",
        "lamb",
        "longer",
    }  # the others are the plain one
    last = next(key for key in rows if key.part == "start")
    assert last.lr == best["sgd"]
    assert "start" not in study.minima.found({key: rows[key] for key in rows if key != last}, scale)
    assert [key.lr for key in rows if key.part == "line"] == [0.03]
    tuned = [key for key in rows if key.seed in scale.tuning]
    assert len(tuned) == 4 * 2 * (
        1 + 1 + 2 * 2 + 4
    )  # plain and sgd once, LARS and LAMB at both sizes, growing
    assert {key.lr for key in rows if key.part == "growth" and key.seed in scale.seeds} == {0.03}


@pytest.mark.parametrize(
    ("case", "first", "peak", "epochs"),
    [
        ("plain", 0.1, 0.1, 6),
        ("longer", 0.1, 0.1, 96),
        ("linear", 0.1, 1.6, 6),
        ("sgd", 0.004, 0.4, 6),
        ("lars", 0.004, 0.4, 6),
        ("lamb", 0.004, 0.4, 6),
    ],
)
def test_rates_at_a_larger_batch(study: Modules, case: str, first: float, peak: float, epochs: int) -> None:
    """First rate and the one after warm-up, of 50 steps an epoch: the cosine has fallen by a quarter then."""
    scale = study.ledger.Scale(epochs=6)
    options = study.minima.options(study.ledger.Key("batch", "dense", case, 2048, 0.1, 1), scale)
    rate, steps = options["optimizer"].lr, 50 * epochs
    at = [gs.schedules.Position(step, steps, 50) for step in (0, 100)]
    assert options["epochs"] == epochs
    assert rate(at[0]) == pytest.approx(first)
    assert rate(at[1]) == pytest.approx(peak * (1 + np.cos(np.pi * 100 / steps)) / 2)


def test_a_study_that_was_stopped_goes_on(study: Modules, tmp_path: Path) -> None:
    path, key = tmp_path / "rows.jsonl", study.ledger.Key("saddle", "quartic", "sgd", 1, 0.1, 1)
    line = json.dumps(key._asdict() | {"updates": 3})
    path.write_text(f"{line}\n{line[:40]}")
    assert list(study.ledger.read_rows(path)) == [key]
    assert path.read_text() == f"{line}\n"


def test_what_is_there_is_drawn(study: Modules, tmp_path: Path) -> None:
    scale = study.ledger.Scale(models=("dense",), batches=(128, 512))
    figures = study.minima.found(worked_off(study, scale, lambda key: 50.0), scale)
    study.plots.draw({"found": {name: figures[name] for name in ("batch", "line")}}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"large-batch-dense.svg", "large-batch-line.svg"}


def test_the_fit_finds_the_trade_off(study: Modules) -> None:
    sizes = (16, 128, 1024, 5000)
    assert study.critical.fit(sizes, [40 + 8000 / size for size in sizes]) == pytest.approx((40, 8000))


def known_problem(study: Modules) -> tuple[float, float]:
    """The noise scale of a linear model, as measured, and from the covariance of its samples' gradients."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(250, 3, generator=generator), torch.randint(0, 2, (250,), generator=generator)
    module = nn.Linear(3, 2, bias=False)
    weight = torch.randn(2, 3, generator=generator)
    slope = torch.softmax(x @ weight.T, 1) - nn.functional.one_hot(y, 2)
    each = (slope[:, :, None] * x[:, None]).flatten(1).double().numpy()
    variance = np.trace(np.cov(each.T))
    expected = variance / ((each.mean(0) ** 2).sum() - variance / len(each))
    return study.critical.noise_scale(module, {"weight": weight}, x, y), float(expected)


def test_the_noise_scale_is_that_of_the_covariance(study: Modules) -> None:
    measured, expected = known_problem(study)
    assert measured == pytest.approx(expected, rel=1e-5)


def test_a_chunk_that_is_forgotten_is_noticed(study: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = study.critical.vmap
    monkeypatch.setattr(
        study.critical,
        "vmap",
        lambda *given, **named: lambda weights, x, y: plain(*given, **named)(weights, x[:-1], y[:-1]),
    )
    measured, expected = known_problem(study)
    assert measured != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("case", "rank"), [("linear", 2), ("zero", 0)])
def test_a_saddle_is_one(study: Modules, case: str, rank: int) -> None:
    """The gradient over all samples is 0, that of a sample only at zero; and the first direction leads down."""
    _, _, outside = study.saddles._linear(case, [])
    x, y, first = study.saddles._problem()
    point = {name: value * (case == "linear") for name, value in first.items()}
    hidden = x @ point["w1"].T
    error = hidden @ point["w2"].T - y
    assert np.abs(point["w2"].T @ error.T @ x / len(x)).max() < 1e-12
    assert np.abs(error.T @ hidden / len(x)).max() < 1e-12
    assert bool(np.abs(error[:1].T @ hidden[:1]).max() > 1e-3) is (case == "linear")
    assert np.linalg.matrix_rank(point["w2"] @ point["w1"]) == rank
    assert not outside(point)
    left, _, right = np.linalg.svd(y.T @ x)
    moved = {"w2": point["w2"].copy(), "w1": point["w1"].copy()}
    moved["w2"][:, 1] += 0.1 * left[:, 0]
    moved["w1"][1] += 0.1 * right[0]
    errors = [x @ each["w1"].T @ each["w2"].T - y for each in (point, moved)]
    assert (errors[1] ** 2).sum() < (errors[0] ** 2).sum() - 10
