"""The jobs by which the project was first told, as they were told, against numpy alone."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.transport.limits import Limits

MACHINES = int(os.environ.get("TOLD_MACHINES", "528"))
"""It was told with 1024."""


@pytest.fixture
def example(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `examples/linear_regression.py`."""
    monkeypatch.syspath_prepend(str(repository / "examples"))
    return importlib.import_module("linear_regression")


def descent(example: Any, steps: int) -> dict[str, Any]:
    """Gradient descent in float64 on all samples at once."""
    inputs, targets = (np.float64(array) for array in example.samples())
    parameters: Any = {name: np.float64(array) for name, array in example.init(0).items()}
    for _ in range(steps):
        _, gradients = example.gradients(parameters, inputs, targets)
        parameters = {name: parameters[name] - 0.1 * gradients[name] for name in parameters}
    return dict(parameters)


@pytest.mark.parametrize("strategy", ["synchronous", "allreduce"])
def test_400_samples_on_4_machines_100_each_a_round(example: Any, strategy: str) -> None:
    """A round is all of the data, so the order of samples does not matter."""
    servers = 0 if strategy == "allreduce" else 1
    run = gs.simulate(example.job(), strategy=strategy, servers=servers, batch_size=100, epochs=20)
    assert run.summary["steps"] == 4 * 20
    assert run.summary["samples_accounted"] == 400 * 20
    for name, array in descent(example, 20).items():
        np.testing.assert_allclose(run.parameters[name], array, rtol=1e-5)


def test_a_batch_as_many_machines_with_a_sample_each(example: Any) -> None:
    """More machines than one caller may have streams: those that join wait side by side."""
    assert Limits().streams < MACHINES
    data = gs.from_arrays(*example.samples(MACHINES))
    parts, whole = (
        gs.simulate(example.job(), data, workers=workers, batch_size=size, epochs=1)
        for workers, size in ((MACHINES, 1), (1, MACHINES))
    )
    assert parts.summary["samples_accounted"] == whole.summary["samples_accounted"] == MACHINES
    for name, array in whole.parameters.items():
        np.testing.assert_allclose(parts.parameters[name], array, rtol=1e-5)
