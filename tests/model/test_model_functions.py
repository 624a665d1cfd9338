"""`from_functions`: user functions on numpy arrays, and the errors for wrong ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from gradstream.errors import ConfigError, GradientError
from gradstream.model import Batch, FunctionsModel, finite, from_functions

RNG = np.random.default_rng(0)
BATCH = Batch(RNG.standard_normal((6, 3)), RNG.standard_normal(6), 6, np.arange(6))


def init(seed: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(seed).standard_normal(3), "b": 0.0}


def outputs(p: Any, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def gradients(p: Any, x: Any, y: Any) -> Any:
    error = outputs(p, x) - y
    return {"b": 2 * error.mean(), "w": 2 / np.float32(len(x)) * x.T @ error}


def square(o: Any, y: Any) -> Any:
    return ((o - y) ** 2).mean()


def run(model: FunctionsModel) -> tuple[float, dict[str, np.ndarray[Any, Any]], list[int]]:
    parameters = torch.empty(model.layout.elems, dtype=model.layout.dtype)
    model.init(1, parameters)
    flat, reports = torch.full_like(parameters, torch.nan), list[int]()
    loss = model.gradient(parameters, BATCH, flat, seed=0, report=reports.append)
    return loss, dict(model.tree(flat)), reports


def returning(result: Any, dtype: Any = "float32") -> FunctionsModel:
    return from_functions(init, outputs, lambda p, x, y: result, dtype=dtype)


def test_gradients_by_hand() -> None:
    model = from_functions(init, outputs, gradients)
    assert [s.name for s in model.layout.slots] == ["b", "w"]
    loss, found, reports = run(model)
    w = init(1)["w"].astype(np.float32)
    x, y = BATCH.inputs.astype(np.float32), BATCH.targets.astype(np.float32)
    np.testing.assert_allclose(found["w"], 2 / 6 * x.T @ (x @ w - y), rtol=1e-5)
    assert math.isnan(loss)
    assert list(found) == ["w", "b"]
    assert reports == [1, 4]


def test_loss_from_gradients_or_from_loss() -> None:
    def with_loss(p: Any, x: Any, y: Any) -> Any:
        return square(outputs(p, x), y), gradients(p, x, y)

    first = run(from_functions(init, outputs, with_loss))
    second = run(from_functions(init, outputs, gradients, loss=square))
    assert first[0] == second[0] > 0
    assert all(np.array_equal(first[1][name], second[1][name]) for name in first[1])


def test_parameters_are_read_only_views_without_a_copy() -> None:
    seen: list[Any] = []

    def spy(p: Any, x: Any, y: Any) -> Any:
        seen.append(p["w"])
        p["w"] += 1
        return gradients(p, x, y)

    model = from_functions(init, outputs, spy)
    parameters = torch.zeros(4)
    with pytest.raises(ValueError, match="read-only"):
        model.gradient(parameters, BATCH, torch.zeros(4), seed=0, report=lambda n: None)
    assert seen[0].ctypes.data == parameters[1:].data_ptr()
    assert seen[0].dtype == np.float32


def test_one_flat_vector() -> None:
    model = from_functions(
        lambda seed: np.full(3, seed),
        lambda p, x: x @ p,
        lambda p, x, y: x.T @ (x @ p - y),
        reduction="sum",
    )
    assert [(s.name, s.shape) for s in model.layout.slots] == [("parameters", (3,))]
    assert run(model)[1]["parameters"].shape == (3,)
    assert model.outputs(torch.ones(3), BATCH.inputs).shape == (6,)


def test_nested_trees() -> None:
    tree = {"hidden": [{"w": np.ones((2, 3)), "b": np.zeros(2)}, {"w": np.ones((1, 2))}], "scale": 1.0}
    as_float32 = {
        "hidden": [
            {"w": np.full((2, 3), 1, "f4"), "b": np.full(2, 2, "f4")},
            {"w": np.full((1, 2), 3, "f4")},
        ],
        "scale": 4,
    }
    seen: list[Any] = []

    def spy(p: Any, x: Any, y: Any) -> Any:
        seen.append(p)
        return as_float32

    model = from_functions(lambda seed: tree, lambda p, x: x, spy)
    assert [s.name for s in model.layout.slots] == ["scale", "hidden.1.w", "hidden.0.b", "hidden.0.w"]
    found = run(model)[1]
    assert [v.flat[0] for v in found.values()] == [1, 2, 3, 4]
    assert seen[0]["hidden"][1]["w"].shape == (1, 2)


def test_float64() -> None:
    loss, found, _ = run(from_functions(init, outputs, gradients, loss=square, dtype="float64"))
    assert found["w"].dtype == np.float64
    assert loss > 0


def test_no_samples_no_gradient() -> None:
    model = from_functions(init, outputs, gradients)
    empty = Batch(BATCH.inputs[:0], BATCH.targets[:0], 0, np.arange(0))
    flat = torch.ones(4)
    assert model.gradient(torch.ones(4), empty, flat, seed=0, report=lambda n: None) == 0.0
    assert flat.abs().sum() == 0


F4 = np.zeros(3, "f4")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            {"w": np.zeros(3), "b": 0.0},
            r"'w' is float64, expected float32: .*astype\(\"float32\"\).*dtype=\"float64\"",
        ),
        ({"w": np.zeros(3, int), "b": 0.0}, r"'w' is int64, expected float32"),
        ({"w": ["a"] * 3, "b": 0.0}, r"missing \['w'\]"),
        ({"w": np.array(["a"] * 3), "b": 0.0}, r"'w' is <U1"),
        ({"w": np.zeros((3, 1), "f4"), "b": 0.0}, r"'w' has shape \(3, 1\), expected \(3,\)"),
        ({"w": F4}, r"missing \['b'\], not known \[\]"),
        ({"w": F4, "b": 0.0, "c": 1}, r"missing \[\], not known \['c'\]"),
        (F4, r"missing \['b', 'w'\]"),
        ({"w": F4, "b": None}, "'b' is object"),
        ((1.0, {"w": F4, "b": 0.0}, 3), "tuple of 3"),
        ((math.nan, {"w": F4, "b": 0.0}), "loss is nan"),
        ((F4, {"w": F4, "b": 0.0}), r"loss is ndarray of shape \(3,\)"),
    ],
)
def test_unusable_gradients(result: Any, words: str) -> None:
    with pytest.raises(GradientError, match=words):
        run(returning(result))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({}, "no arrays, expected at least one to train"),
        ({"w": (1.0, 2.0), "a": "text"}, "'a'"),
        ({"w": np.zeros(2, complex)}, "complex128 for 'w'"),
        ({"a.b": np.zeros(1), "a": {"b": np.zeros(1)}}, "two arrays are named 'a.b'"),
    ],
)
def test_unusable_parameters(tree: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_functions(lambda seed: tree, outputs, gradients).layout  # noqa: B018  building is what fails


def test_unusable_arguments() -> None:
    with pytest.raises(ConfigError, match="reduction"):
        from_functions(init, outputs, gradients, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dtype"):
        from_functions(init, outputs, gradients, dtype="float16")  # type: ignore[arg-type]
    model = from_functions(lambda seed: np.zeros(2 + seed), outputs, gradients)
    with pytest.raises(ConfigError, match="must not depend on the seed"):
        model.init(1, torch.zeros(model.layout.elems))


def test_finite() -> None:
    assert finite(torch.zeros(0))
    assert finite(torch.full((3,), 3e38))  # the sum overflows, no element does
    assert finite(torch.tensor([3e38, 3e38, -3e38]))
    for bad in (math.nan, math.inf, -math.inf):
        assert not finite(torch.tensor([1.0, bad]))
    assert not finite(torch.tensor([math.inf, -math.inf]))
