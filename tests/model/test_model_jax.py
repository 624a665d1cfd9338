"""`from_jax`: any pytree of parameters, JAX's own gradient in the flat vector, alone and in whole runs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream.errors import ConfigError, GradientError
from gradstream.job.files import load_job
from gradstream.model import Batch, JaxModel, from_jax
from gradstream.run.local.forkserver import WARM

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'gradstream[jax]'")
jnp = jax.numpy

Layer = namedtuple("Layer", ["weight", "bias"])


def init(seed: int) -> Any:
    key = jax.random.key(seed)
    return {"hidden": [Layer(jax.random.normal(key, (4, 5)), jnp.zeros(5))], "out": (np.ones((5, 3)),)}


def outputs(parameters: Any, inputs: Any) -> Any:
    layer = parameters["hidden"][0]
    return jnp.tanh(inputs @ layer.weight + layer.bias) @ parameters["out"][0]


def loss(parameters: Any, batch: Any) -> Any:
    inputs, targets = batch
    logits = jax.nn.log_softmax(outputs(parameters, inputs))
    return -jnp.take_along_axis(logits, targets[:, None], axis=1).mean()


@pytest.fixture
def batch() -> Batch:
    rng = np.random.default_rng(0)
    return Batch(rng.standard_normal((8, 4)), rng.integers(0, 3, 8), 8, np.arange(8))


def run(model: JaxModel, batch: Batch, seed: int = 0) -> tuple[float, torch.Tensor, list[int]]:
    parameters = torch.empty(model.layout.elems, dtype=model.layout.dtype)
    model.init(3, parameters)
    gradient = torch.full_like(parameters, torch.nan)
    reports: list[int] = []
    value = model.gradient(parameters, batch, gradient, seed=seed, report=reports.append)
    return value, gradient, reports


def test_names_are_paths_and_gradients_are_jaxs_own(batch: Batch) -> None:
    model = from_jax(init, outputs, loss)
    assert [slot.name for slot in model.layout.slots] == ["out.0", "hidden.0.bias", "hidden.0.weight"]
    assert list(model.tree(torch.zeros(model.layout.elems))) == ["hidden.0.weight", "hidden.0.bias", "out.0"]
    value, gradient, reports = run(model, batch)
    single = (batch.inputs.astype(np.float32), batch.targets)
    parameters = jax.tree_util.tree_map(lambda a: jnp.asarray(a, jnp.float32), init(3))
    expected_loss, expected = jax.jit(jax.value_and_grad(loss))(parameters, single)
    assert value == float(expected_loss)
    views = dict(model.layout.views(gradient))
    assert views["hidden.0.weight"].numpy().tobytes() == np.asarray(expected["hidden"][0].weight).tobytes()
    assert views["out.0"].numpy().tobytes() == np.asarray(expected["out"][0]).tobytes()
    assert reports == list(model.layout.milestones)
    flat = torch.empty(model.layout.elems)
    model.init(3, flat)
    found = model.outputs(flat, batch.inputs)
    np.testing.assert_array_equal(found.numpy(), jax.jit(outputs)(parameters, single[0]))


def test_float64_without_touching_jaxs_configuration(batch: Batch) -> None:
    value, gradient, _ = run(from_jax(init, outputs, loss, dtype="float64"), batch)
    assert gradient.dtype == torch.float64
    assert value == pytest.approx(run(from_jax(init, outputs, loss), batch)[0], rel=1e-5)
    assert not np.array_equal(gradient.float().double(), gradient)  # double precision it was
    assert jnp.ones(1, jnp.float64 if jax.config.jax_enable_x64 else jnp.float32).dtype == jnp.ones(1).dtype
    assert not jax.config.jax_enable_x64


def test_a_key_for_dropout_is_a_function_of_the_seed(batch: Batch) -> None:
    def dropped(parameters: Any, batch: Any, rng: Any) -> Any:
        kept = jax.random.bernoulli(rng, 0.5, batch[0].shape)
        return loss(parameters, (batch[0] * kept, batch[1])), {"aux": kept}

    model = from_jax(init, outputs, dropped)
    first, again, other = (run(model, batch, seed)[1] for seed in (5, 5, 6 << 40))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_inputs_alone_and_no_samples(batch: Batch) -> None:
    model = from_jax(lambda seed: jnp.ones(2), lambda p, x: x["a"] * p, lambda p, x: (x["a"] * p).sum())
    assert [slot.name for slot in model.layout.slots] == ["parameters"]
    value, gradient, _ = run(model, Batch({"a": np.array([[1, 2]], np.float32)}, None, 1, np.arange(1)))
    assert (value, gradient.tolist()) == (3.0, [1.0, 2.0])
    value, gradient, reports = run(model, Batch(None, None, 0, np.arange(0)))
    assert (value, gradient.tolist(), reports) == (0.0, [0.0, 0.0], [2])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda p, b: p["w"], r"shape \(2,\), expected a scalar"),
        (lambda p, b: (p["w"].sum(), 1, 2), "a tuple of 3"),
        (lambda p, b: p["w"].sum() / 0, "loss is inf"),
        (lambda p, b: 1, "loss is int, expected a floating"),
    ],
)
def test_unusable_losses(wrong: Any, words: str) -> None:
    model = from_jax(lambda seed: {"w": np.ones(2)}, lambda p, x: x, wrong)
    with pytest.raises(GradientError, match=words):
        run(model, Batch(np.ones(1), None, 1, np.arange(1)))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (lambda seed: {}, "no arrays"),
        (lambda seed: {"w": "text"}, "expected an array of real numbers"),
        (lambda seed: {"a": {"b": 1.0}, "a.b": 2.0}, "two arrays are named 'a.b'"),
        (lambda seed: {"w": np.ones(2 + seed)}, "init.3. returned another tree or other shapes"),
    ],
)
def test_unusable_initial_parameters(tree: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(from_jax(tree, lambda p, x: x, lambda p, b: 0.0), Batch(np.ones(1), None, 1, np.arange(1)))


def test_wrong_arguments_and_no_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="reduction is 'max'"):
        from_jax(init, outputs, loss, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dtype is 'float16'"):
        from_jax(init, outputs, loss, dtype="float16")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ConfigError, match=r"pip install 'gradstream\[jax\]'"):
        from_jax(init, outputs, loss).layout  # noqa: B018  the first use is what fails


@pytest.mark.cold
def test_what_is_loaded_before_the_fork_does_not_import_jax() -> None:
    code = f"import importlib, sys\nfor name in {WARM!r}: importlib.import_module(name)\n"
    code += "assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- whole runs -----------------------------------------------------------------------------


def squares(parameters: Any, batch: Any) -> Any:
    return ((batch[0] @ parameters["w"] - batch[1]) ** 2).sum() / 2


def test_synchronous_is_one_node_with_the_joined_batch_bit_for_bit() -> None:
    """Whole numbers and powers of two: every sum is exact, in whatever order."""
    rng = np.random.default_rng(1)
    data = gs.from_arrays(rng.integers(-2, 3, (32, 3)) * 1.0, rng.integers(-2, 3, 32) * 1.0)
    model = from_jax(
        lambda seed: {"w": np.zeros(3)}, lambda p, x: x @ p["w"], squares, reduction="sum", dtype="float64"
    )
    options: Any = {"optimizer": gs.optim.SGD(lr=2.0**-7), "steps": 4, "chunk_elems": 64, "seed": 2}
    four = gs.simulate(model, data, workers=4, batch_size=4, **options)
    one = gs.simulate(model, data, workers=1, batch_size=16, **options)
    assert four.parameters["w"].tobytes() == one.parameters["w"].tobytes()
    assert np.abs(four.parameters["w"]).max() > 0


LOGISTIC = """
import jax, jax.numpy as jnp, numpy as np
import gradstream as gs

def outputs(parameters, inputs):
    return inputs @ parameters["w"] + parameters["b"]

def loss(parameters, batch):
    inputs, targets = batch
    logits = outputs(parameters, inputs)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1).mean()

def job():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 2)).astype("float32")
    y = (x[:, 0] > x[:, 1]).astype("int64")
    model = gs.from_jax(lambda seed: {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}, outputs, loss)
    return gs.Job(model, gs.from_arrays(x[:300], y[:300], x[300:], y[300:]), optimizer=gs.optim.SGD(lr=0.5),
                  workers=2, batch_size=25, epochs=6, chunk_elems=64)
"""


def test_logistic_regression_on_real_processes_and_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logistic.py").write_text(textwrap.dedent(LOGISTIC))
    run = gs.train(load_job("logistic.py"), run_dir=tmp_path / "run")
    accuracy = run.evaluate().accuracy
    assert accuracy is not None
    assert accuracy > 0.95
    simulated = gs.simulate(load_job("logistic.py"))
    for name in ("w", "b"):
        np.testing.assert_allclose(simulated.parameters[name], run.parameters[name], rtol=1e-5, atol=1e-6)
    downpour = gs.simulate(load_job("logistic.py"), strategy="downpour", optimizer=gs.optim.SGD(lr=0.2))
    assert downpour.evaluate().accuracy == pytest.approx(accuracy, abs=0.05)
