"""What the three programs train: least squares on synthetic data."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

FEATURES = 20
TRUE = np.random.default_rng(1).standard_normal(FEATURES)
"""The weights that the data was made with."""

Minibatch = tuple[np.ndarray, np.ndarray]


def samples(num_samples: int = 4000) -> Minibatch:
    """Inputs (n, 20) and targets (n,) with noise of standard deviation 0.1."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((num_samples, FEATURES))
    return x, x @ TRUE + 0.1 * rng.standard_normal(num_samples)


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of half the mean squared error, over the samples of a minibatch."""
    return (x @ w - y) @ x / len(y)


def minibatches(rank: int, workers: int, size: int = 20, epochs: int = 3) -> Iterator[Minibatch]:
    """Worker `rank` has every W-th sample, and goes through them in another order in each epoch."""
    x, y = (array[rank::workers] for array in samples())
    rng = np.random.default_rng(rank)
    for _ in range(epochs):
        order = rng.permutation(len(y))
        for first in range(0, len(y), size):
            ids = order[first : first + size]
            yield x[ids], y[ids]


def distance(w: np.ndarray) -> float:
    """How far the weights are from the true ones; about 0.01 is as near as the noise lets them come."""
    return float(np.linalg.norm(w - TRUE))
