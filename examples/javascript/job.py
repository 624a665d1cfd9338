"""Softmax regression whose workers may be in any language: 10 classes in 32 dimensions, 4,000 samples.

    gradstream train job.py --listen 10.0.0.1 --wait 2 --servers-on launcher

On another machine, `node worker.mjs` with the arguments of the line that this prints, beside copies of this file and
of the four arrays, which the first call writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradstream as gs

Array = NDArray[Any]
Parameters = dict[str, Array]

HERE = Path(__file__).parent
NAMES = ("inputs", "targets", "test_inputs", "test_targets")
CLASSES, FEATURES = 10, 32


def arrays() -> list[Array]:
    """Training and test samples around ten centres, from the files beside this one."""
    if not (HERE / "inputs.npy").exists():
        rng = np.random.default_rng(0)
        targets = rng.integers(CLASSES, size=5000).astype(np.uint8)
        centres = rng.standard_normal((CLASSES, FEATURES))
        inputs = (0.7 * centres[targets] + rng.standard_normal((5000, FEATURES))).astype(np.float32)
        for name, array in zip(
            NAMES, (inputs[:4000], targets[:4000], inputs[4000:], targets[4000:]), strict=True
        ):
            np.save(HERE / f"{name}.npy", array)
    return [np.load(HERE / f"{name}.npy") for name in NAMES]


def outputs(parameters: Parameters, inputs: Array) -> Array:
    """Logits (n, CLASSES); the first row of the weights is the bias."""
    weights = parameters["weights"]
    return inputs @ weights[1:] + weights[0]


def gradients(parameters: Parameters, inputs: Array, targets: Array) -> tuple[float, Parameters]:
    """The mean cross-entropy, and its derivative."""
    logits, rows = outputs(parameters, inputs), np.arange(len(inputs))
    logits -= logits.max(axis=1, keepdims=True)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    loss = -np.log(chances[rows, targets]).mean()
    chances[rows, targets] -= 1
    with_ones = np.concatenate([np.ones((len(inputs), 1), np.float32), inputs], axis=1)
    return float(loss), {"weights": with_ones.T @ chances / len(inputs)}


def job() -> gs.Job:
    """Two workers with minibatches of 20; `overlap=False`, since a worker in JavaScript pushes before it pulls."""
    return gs.Job(
        gs.from_functions(lambda seed: {"weights": np.zeros((FEATURES + 1, CLASSES))}, outputs, gradients),
        gs.from_arrays(*arrays()),
        strategy=gs.Downpour(overlap=False),
        optimizer=gs.optim.SGD(lr=0.1),
        workers=2,
        batch_size=20,
        epochs=3,
    )
