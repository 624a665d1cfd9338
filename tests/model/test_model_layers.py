"""Models of layer functions, of torch and of JAX: whole, and split between layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import ConfigError
from gradstream.testing.runs import QUICK
from split_jobs import CLASSES, FEATURES, data, difference

SIZES = [(FEATURES, 9), (9, 7), (7, 8), (8, CLASSES)]
made: list[int] = []
"""Seeds with which `init` of a layer of JAX was called with values."""


def numbers(seed: int, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape) / 3


def layers(of: str) -> list[Any]:
    """A network of four layers, with functions of x alone between them."""
    if of == "torch":
        tanh: Any = torch.tanh
    else:
        import jax.numpy as jnp

        tanh = jnp.tanh

    def linear(rows: int, columns: int) -> Any:
        def init(seed: int) -> Any:
            made.append(seed)
            return {"w": numbers(seed, (rows, columns)), "more": [numbers(seed + 1, (columns,))]}

        return init, lambda p, x: x @ p["w"] + p["more"][0]

    found: list[Any] = []
    for rows, columns in SIZES:
        found += [linear(rows, columns), tanh]
    return found[:-1]


def loss(of: str) -> Any:
    if of == "torch":
        return nn.functional.cross_entropy
    import jax

    def cross_entropy(outputs: Any, targets: Any) -> Any:
        chosen = jax.nn.log_softmax(outputs)[jax.numpy.arange(len(targets)), targets]
        return -chosen.mean()

    return cross_entropy


def run(of: str, **options: Any) -> Any:
    pytest.importorskip("jax" if of == "jax" else "torch")
    model = gs.model.from_layers(layers(of), loss(of), of=of, dtype="float64")  # type: ignore[arg-type]
    given: dict[str, Any] = {"workers": 2, "batch_size": 6, "epochs": 2, "chunk_elems": 64}
    return simulate(
        model, data(), strategy="synchronous", deadlines=QUICK, evaluate_every=3, **given | options
    )


def test_layers_of_jax_train_as_those_of_torch() -> None:
    ours, theirs = run("jax"), run("torch")
    assert set(ours.parameters) == {f"{n}.{name}" for n in (0, 2, 4, 6) for name in ("w", "more.0")}
    assert difference(ours, theirs) < 1e-12
    assert [one["accuracy"] for one in ours.evaluations] == [one["accuracy"] for one in theirs.evaluations]


@pytest.mark.parametrize(("of", "split", "micro_batches"), [("jax", 4, 3), ("torch", 2, 1)])
def test_layers_of_a_split_model_train_as_the_whole(of: str, split: int, micro_batches: int) -> None:
    whole = run(of)
    split_run = run(of, split=split, micro_batches=micro_batches, pipeline="1f1b")
    assert difference(whole, split_run) < 1e-12
    assert [one["accuracy"] for one in whole.evaluations] == [
        one["accuracy"] for one in split_run.evaluations
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([3], r"layers\[0\] is 3"),
        ([(None, None)], "expected a pair of functions"),
        ([(lambda seed: {}, lambda p, x: x, 1)], "expected a pair of functions"),
    ],
)
def test_what_is_no_layer_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gs.model.from_layers(given, lambda y, t: y.mean(), of="torch")
