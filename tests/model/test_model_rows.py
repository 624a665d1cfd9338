"""Row-sparse gradients of models: the rows equal those of the whole gradient, and the rest is zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError, GradientError
from gradstream.model.base import Batch, Model
from gradstream.model.rows import RowGradient, merged
from gradstream.worker.gradient import Clip

ROWS, WIDTH = 40, 3


def embedding_model() -> Model:
    return gs.from_torch(
        lambda: nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True), nn.Flatten(), nn.Linear(4 * WIDTH, 5)),
        nn.functional.cross_entropy,
    )


def functions_model(**options: Any) -> Model:
    """Mean squared error of the sum of 4 rows of a table, and a bias."""

    def gradients(p: Any, x: Any, y: Any) -> Any:
        error = 2 / len(x) * (p["table"][x].sum(1) + p["bias"] - y)
        values = np.repeat(error[:, None], x.shape[1], axis=1)
        return {"table": gs.model.Rows(x.ravel(), values.reshape(-1, WIDTH)), "bias": error.sum(0)}

    return gs.from_functions(
        init=lambda seed: {
            "table": np.random.default_rng(seed).normal(size=(ROWS, WIDTH)),
            "bias": np.ones(3),
        },
        outputs=lambda p, x: p["table"][x].sum(1) + p["bias"],
        gradients=options.pop("gradients", gradients),
        row_sparse=["table"],
        dtype="float64",
        **options,
    )


def batch_of(model: Model) -> Batch:
    rng = np.random.default_rng(4)
    inputs = rng.integers(0, 20, (6, 4))  # rows come twice
    double = model.layout.dtype == torch.float64
    targets = rng.normal(size=(6, WIDTH)) if double else rng.integers(0, 5, 6)
    return Batch(inputs, targets, 6, np.arange(6))


@pytest.mark.parametrize("make", [embedding_model, functions_model])
def test_rows_are_what_the_whole_gradient_has(make: Any) -> None:
    model = make()
    layout, batch = model.layout, batch_of(model)
    (table,) = layout.tables
    parameters = torch.empty(layout.elems, dtype=layout.dtype)
    model.init(0, parameters)
    whole, rest = torch.full_like(parameters, 7.0), torch.full((layout.rest.elems,), 7.0, dtype=layout.dtype)
    reported: list[int] = []
    losses = [model.gradient(parameters, batch, whole, seed=1, report=lambda n: None)]
    rows = RowGradient(layout.tables, layout.dtype)
    losses.append(model.gradient(parameters, batch, rest, seed=1, report=reported.append, rows=rows))
    numbers, values = rows[table]
    assert losses[0] == losses[1] or np.isnan(losses).all()
    assert numbers.tolist() == sorted(set(batch.inputs.ravel().tolist()))
    view = dict(layout.views(whole))[table.name]
    assert torch.equal(view[numbers], values)
    assert not np.delete(view.numpy(), numbers.numpy(), axis=0).any()
    views = dict(layout.views(whole))
    assert all(torch.equal(part, views[name]) for name, part in layout.rest.views(rest))
    assert reported[-1] == layout.rest.elems


def test_rows_summed_over_parts_and_clipped() -> None:
    model = functions_model()
    (table,) = model.layout.tables
    rows = RowGradient(model.layout.tables, torch.float64)
    assert [len(part) for part in rows[table]] == [0, 0]
    rows.add(table, torch.tensor([5, 2, 5]), torch.ones(3, WIDTH, dtype=torch.float64))
    rows.add(table, torch.tensor([2]), torch.ones(1, WIDTH, dtype=torch.float64), 0.5)
    numbers, values = rows[table]
    assert (numbers.tolist(), values[:, 0].tolist()) == ([2, 5], [1.5, 2.0])
    rest = torch.zeros(WIDTH, dtype=torch.float64)
    length = Clip(norm=1.0, value=1.75).apply(rest, 1, rows)
    assert length == pytest.approx((3 * 1.5**2 + 3 * 1.75**2) ** 0.5)
    assert float(rows[table][1].norm()) == pytest.approx(1.0)
    with pytest.raises(GradientError, match="row 40; expected rows from 0 to 39"):
        rows.add(table, torch.tensor([40]), torch.ones(1, WIDTH))


def test_merged_sums_up_what_comes_twice() -> None:
    numbers, values = merged(torch.tensor([3, 1, 3]), torch.tensor([[1.0], [2.0], [4.0]]), 5)
    assert (numbers.tolist(), values.flatten().tolist()) == ([1, 3], [2.0, 5.0])


def test_an_embedding_that_something_else_uses_is_dense() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 9, bias=False)
            self.out.weight = self.words.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.out(self.words(x))
            return outputs

    assert not gs.from_torch(Tied, nn.functional.cross_entropy).layout.tables

    class Regularised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.words(x) + self.words.weight.mean()
            return outputs

    model = gs.from_torch(Regularised, nn.functional.mse_loss)
    parameters, rest = torch.zeros(36), torch.zeros(0)
    rows = RowGradient(model.layout.tables, torch.float32)
    batch = Batch(np.array([1, 2]), np.ones((2, 4), "float32"), 2, np.arange(2))
    with pytest.raises(GradientError, match=r"'words.weight': got a dense one.*sparse=False"):
        model.gradient(parameters, batch, rest, seed=0, report=lambda n: None, rows=rows)


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        (np.zeros((ROWS, WIDTH)), "ndarray, expected gradstream.model.Rows"),
        (gs.model.Rows(np.array([0.5]), np.zeros((1, WIDTH))), "row numbers are float64"),
        (gs.model.Rows(np.array([1, 2]), np.zeros((1, WIDTH))), r"shape \(1, 3\), expected \(2, 3\)"),
        (gs.model.Rows(np.array([-1]), np.zeros((1, WIDTH))), "has row -1"),
    ],
)
def test_what_is_no_rows_is_named(leaf: Any, says: str) -> None:
    model = functions_model(gradients=lambda p, x, y: {"table": leaf, "bias": np.zeros(3)})
    parameters = torch.empty(model.layout.elems, dtype=torch.float64)
    model.init(0, parameters)
    with pytest.raises(GradientError, match=says):
        model.gradient(parameters, batch_of(model), parameters.clone(), seed=0, report=lambda n: None)


def test_names_that_are_no_arrays() -> None:
    def make(names: Any) -> Model:
        return gs.from_functions(
            init=lambda seed: {"table": np.zeros((2, 2)), "b": np.zeros(())},
            outputs=lambda p, x: x,
            gradients=lambda p, x, y: p,
            row_sparse=names,
        )

    for names, says in (
        (["tabel"], "did you mean 'table'"),
        (["b"], "expected an array with rows"),
        ("table", "a list"),
    ):
        with pytest.raises(ConfigError, match=says):
            make(names).layout  # noqa: B018  looking is what raises
