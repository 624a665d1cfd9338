"""Linear regression from three numpy functions: 400 samples over 4 workers, 100 each.

    python examples/linear_regression.py

Every round the 4 workers compute the gradient on 25 samples each, and the server applies their
mean: the very numbers of one machine with batches of 100.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import gradstream as gs

Array = NDArray[np.float32]
Parameters = dict[str, Array]

TRUE: Parameters = {
    "weights": np.array([2.0, -1.0, 0.5], np.float32),
    "bias": np.array(3.0, np.float32),
}


def samples(num_samples: int = 400) -> tuple[Array, Array]:
    """Inputs (n, 3) and targets (n,): a plane, and noise of standard deviation 0.1."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((num_samples, 3), np.float32)
    noise = 0.1 * rng.standard_normal(num_samples, np.float32)
    return inputs, inputs @ TRUE["weights"] + TRUE["bias"] + noise


def init(seed: int) -> Parameters:
    """Small random weights, no bias."""
    rng = np.random.default_rng(seed)
    return {"weights": 0.1 * rng.standard_normal(3, np.float32), "bias": np.zeros((), np.float32)}


def outputs(parameters: Parameters, inputs: Array) -> Array:
    """Predictions x w + b."""
    return inputs @ parameters["weights"] + parameters["bias"]


def gradients(parameters: Parameters, inputs: Array, targets: Array) -> tuple[float, Parameters]:
    """The mean squared error, and what its derivatives are."""
    error = outputs(parameters, inputs) - targets
    gradient = {"weights": 2 * inputs.T @ error / len(error), "bias": 2 * error.mean()}
    return float(np.mean(error**2)), gradient


def job() -> gs.Job:
    """4 workers, 1 parameter server, 20 passes over the data."""
    return gs.Job(
        model=gs.from_functions(init, outputs, gradients),
        data=gs.from_arrays(*samples()),
        strategy="synchronous",
        optimizer=gs.optim.SGD(lr=0.1),
        workers=4,
        batch_size=25,
        epochs=20,
    )


if __name__ == "__main__":
    run = gs.train(job())
    for name, true in TRUE.items():
        print(f"{name:8} found {np.round(run.parameters[name], 3)}  true {true}")
