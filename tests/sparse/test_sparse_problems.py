"""Sparse problems and data: equal to the dense arithmetic, and refused if they make no sense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream import sparse
from gradstream.errors import ConfigError, DataError, GradientError, UnknownNameError
from gradstream.model.base import Batch
from gradstream.sparse.data import SparseDataset
from gradstream.sparse.model import SparseModel

pytest.importorskip("numba", reason="numba is not installed: pip install 'gradstream[fast]'")


def small(classes: bool) -> SparseDataset:
    rng = np.random.default_rng(0)
    indices = np.stack([rng.choice(12, 4, replace=False) for _ in range(9)]).ravel()
    targets = rng.integers(0, 2, 9) if classes else rng.standard_normal(9)
    return sparse.from_csr(4 * np.arange(10), indices, rng.standard_normal(36), targets, num_features=12)


def dense(data: SparseDataset) -> tuple[torch.Tensor, torch.Tensor]:
    table = data.tables[0]
    x = torch.zeros(data.num_samples, data.num_features, dtype=torch.float64)
    for i in range(data.num_samples):
        row = slice(table.indptr[i], table.indptr[i + 1])
        x[i, torch.as_tensor(table.indices[row]).long()] = torch.as_tensor(table.values[row]).double()
    return x, torch.as_tensor(table.targets).double()


def gradient_of(model: SparseModel, w: torch.Tensor, data: SparseDataset) -> tuple[float, torch.Tensor]:
    gradient = torch.full_like(w, 7.0)
    batch = data.batch(np.arange(data.num_samples))
    return model.gradient(w, batch, gradient, seed=0, report=lambda _: None), gradient


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "logistic": lambda m, y: torch.nn.functional.softplus(-(2 * y - 1) * m),
    "hinge": lambda m, y: torch.relu(1 - (2 * y - 1) * m),
    "squared": lambda m, y: (m - y) ** 2 / 2,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_autograd(loss: str) -> None:
    data = small(classes=loss != "squared")
    x, y = dense(data)
    w = torch.linspace(-1, 1, 12, dtype=torch.float64, requires_grad=True)
    seen = (x != 0).any(dim=0)  # what no sample touches is not regularised
    expected = LOSSES[loss](x @ w, y).mean() + 0.05 * (w[seen] ** 2).sum() / 2
    expected.backward()
    model = sparse.linear(12, loss=loss, l2=0.05)
    value, gradient = gradient_of(model, w.detach().float(), data)
    assert value == pytest.approx(float(expected.detach()), rel=1e-5)
    assert model.objective(w.detach().float(), data) == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(gradient.double(), w.grad, rtol=1e-4, atol=1e-6)


def test_a_large_margin_overflows_nothing() -> None:
    data = sparse.from_csr([0, 1, 2], [0, 0], [1e4, 1e4], [0, 1])
    value, gradient = gradient_of(sparse.linear(1), torch.ones(1), data)
    assert value == pytest.approx(5e3)
    assert gradient.tolist() == pytest.approx([5e3])


def test_matrix_completion_is_that_of_autograd_and_learns() -> None:
    data = sparse.synthetic_ratings((20, 15), 600, 3, noise=0.0, num_test_entries=50, seed=1)
    model = sparse.matrix_completion((20, 15), 3, l2=1e-4)
    w = torch.zeros(model.layout.elems)
    model.init(2, w)
    table = data.tables[0]
    i, j = torch.as_tensor(table.indices).view(-1, 2).long().T
    factors = w.double().view(-1, 3).requires_grad_()
    product = (factors[i] * factors[j]).sum(dim=1)
    loss = ((product - torch.as_tensor(table.targets)) ** 2).mean() / 2 + 1e-4 * (factors**2).sum() / 2
    loss.backward()  # type: ignore[no-untyped-call]
    value, gradient = gradient_of(model, w, data)
    assert value == pytest.approx(float(loss.detach()), rel=1e-4)
    assert factors.grad is not None
    torch.testing.assert_close(gradient.double(), factors.grad.flatten(), rtol=1e-3, atol=1e-6)
    run = gs.simulate(
        model,
        data,
        strategy="hogwild",
        optimizer=gs.optim.SGD(0.1),
        workers=3,
        batch_size=20,
        epochs=60,
        seed=2,
    )
    assert run.parameters["L"].shape == (20, 3)
    held_out = run.evaluate().loss
    assert held_out is not None and held_out < 0.02 < value


def test_any_strategy_takes_a_sparse_model() -> None:
    data, model = small(classes=True), sparse.linear(12)
    run = gs.simulate(model, data, optimizer=gs.optim.SGD(lr=0.5), workers=3, batch_size=3, steps=1)
    expected = -0.5 * gradient_of(model, torch.zeros(12), data)[1]
    np.testing.assert_allclose(run.parameters["w"], expected, rtol=1e-5, atol=1e-7)


def test_a_problem_of_ones_own() -> None:
    """Counts the updates of each sample in a component of its own."""

    def touched(table: Any, i: int, where: Any) -> int:
        where[0] = i
        return 1

    def gradient(w: Any, table: Any, i: int, where: Any, count: int, into: Any) -> float:
        into[0] = -1.0
        return 0.0

    data = small(classes=False)
    model = sparse.from_samples(
        [("count", (9,))], touched, gradient, most=1, scores=lambda w, rows: w[rows.ids]
    )
    run = gs.simulate(
        model, data, strategy="hogwild", optimizer=gs.optim.SGD(1.0), workers=2, batch_size=2, epochs=3
    )
    assert run.parameters["count"].tolist() == [3] * 9


def test_a_shape_only_run_has_durations_and_no_arithmetic() -> None:
    run = gs.simulate(
        sparse.linear(12), small(True), strategy="hogwild", workers=2, batch_size=2, epochs=2,
        config=gs.sim.SimulationConfig(shape_only=True),
    )  # fmt: skip
    assert run.summary["samples"] == 18


# ---- data -------------------------------------------------------------------------------------


def test_rows_are_sorted_and_classes_are_0_and_1() -> None:
    data = sparse.from_csr([0, 3, 4], [5, 0, 2, 1], [1, 2, 3, 4], [-1, 1])
    table = data.tables[0]
    assert (table.indices.tolist(), table.values.tolist()) == ([0, 2, 5, 1], [2, 3, 1, 4])
    assert data.batch(np.array([1, 0])).targets.tolist() == [1, 0]
    assert table.scale.tolist() == [2, 2, 2, 0, 0, 2]
    assert not sparse.from_csr([0, 1], [0], [1.0], [0.5]).classes


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([1, 2], [0, 1], [1, 1], [0]), "begin at 0"),
        (([0, 2], [0], [1], [0]), "as indptr says"),
        (([0, 1], [0], [1], [0, 1]), "as indptr says"),
        (([0, 1], [-1], [1], [0]), "numbers of features, which begin at 0"),
        (([0, 1], [0], [np.nan], [0]), "not finite"),
        (([0, 2], [3, 3], [1, 1], [0]), "sample 0 has feature 3 twice"),
        (([0], [], [], []), "no samples"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arguments: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        sparse.from_csr(*arguments)


def test_more_that_is_refused() -> None:
    with pytest.raises(DataError, match="num_features=2"):
        sparse.from_csr([0, 1], [2], [1], [0], num_features=2)
    with pytest.raises(DataError, match="outside of the 2 × 2"):
        sparse.from_ratings([0], [2], [1.0], (2, 2))
    with pytest.raises(DataError, match="ids from 9 to 9"):
        small(True).batch(np.array([9]))
    with pytest.raises(UnknownNameError, match="did you mean 'logistic'"):
        sparse.linear(3, loss="logistics")
    with pytest.raises(ConfigError, match="expected"):
        sparse.linear(0)
    with pytest.raises(ConfigError, match="expected"):
        sparse.matrix_completion((3, 3), 0)
    for options in ({"touched": 11}, {"task": "ranks"}, {"skew": -1.0}):
        with pytest.raises(ConfigError, match="expected"):
            sparse.synthetic(**{"num_samples": 5, "num_features": 10, "touched": 2, **options})  # type: ignore[arg-type]
    batch = Batch(np.zeros((1, 12)), np.zeros(1), 1, np.zeros(1, np.int64))
    with pytest.raises(GradientError, match="sparse data"):
        sparse.linear(12).gradient(torch.zeros(12), batch, torch.zeros(12), seed=0, report=lambda _: None)


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 1.5])
def test_synthetic_samples_are_as_asked_for(skew: float) -> None:
    data = sparse.synthetic(2000, 3000, 30, num_test_samples=100, skew=skew, noise=0.0)
    rows = data.tables[0].indices.reshape(-1, 30)
    assert (np.diff(rows, axis=1) > 0).all()
    assert 0 <= rows.min() < rows.max() < 3000
    found = data.sparsity()
    assert found.omega == 30
    assert (found.delta > 0.3) == (skew >= 1.0)
    norms = np.linalg.norm(data.tables[0].values.reshape(-1, 30), axis=1)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)
    again = sparse.synthetic(2000, 3000, 30, num_test_samples=100, skew=skew, noise=0.0)
    assert again.tables[0].indices.tobytes() == rows.tobytes()
    assert 0.4 < data.tables[1].targets.mean() < 0.6


def test_sparsity_is_that_of_the_paper() -> None:
    data = sparse.from_csr([0, 2, 4, 5, 6], [0, 1, 1, 2, 3, 1], np.ones(6), [0, 1, 1, 0])
    exact = data.sparsity(exact=True)
    assert (exact.omega, exact.delta, exact.rho) == (2, 3 / 4, 3 / 4)  # three samples have feature 1
    bound = data.sparsity()
    assert (bound.omega, bound.delta, bound.rho, bound.exact) == (2, 3 / 4, 1.0, False)


def test_files_in_the_svmlight_format(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("+1 3:0.5 1:2 # a remark\n\n-1 qid:7 2:1.5\n")
    data = sparse.from_svmlight(path, path)
    table = data.tables[0]
    assert table.indptr.tolist() == [0, 2, 3]
    assert table.indices.tolist() == [0, 2, 1]
    assert table.values.tolist() == [2.0, 0.5, 1.5]
    assert data.batch(np.arange(2)).targets.tolist() == [1, 0]
    assert (data.name, data.num_test_samples, data.num_features) == ("some", 2, 3)
    for text, match in (
        ("1 3:x\n", "some.txt:1: could not convert"),
        ("1 0:1\n", "expected numbers from 1 on"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=match):
            sparse.from_svmlight(path)
    assert sparse.read_svmlight(path, first=0)[1].tolist() == [0]
    with pytest.raises(ConfigError, match="no such file"):
        sparse.from_svmlight(tmp_path / "none")
