"""Sharpness of a minimum: how much the loss grows in a small box around it (Keskar et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradstream.errors import ConfigError
from gradstream.ext.analysis.full_loss import Vector
from gradstream.machine.resources import free_memory_bytes

ITERATIONS = 10
"""Of L-BFGS-B, as in the paper."""

MEMORY = 10
"""Pairs that L-BFGS-B keeps."""

Loss = Callable[[Vector], tuple[float, Vector]]


@dataclass(frozen=True)
class Sharpness:
    """How sharp a minimum is.

    Args:
        value: φ, in percent.
        epsilon: ε, the size of the box.
        subspace: p, the number of random directions; None is the whole space.
        loss: f(x).
        largest: the largest loss that was found in the box.
        passes: evaluations of the loss and its gradient over all samples.
    """

    value: float
    epsilon: float
    subspace: int | None
    loss: float
    largest: float
    passes: int


def sharpness(
    loss: Loss,
    x: Vector,
    *,
    epsilon: float = 1e-3,
    subspace: int | None = None,
    iterations: int = ITERATIONS,
    seed: int = 0,
) -> Sharpness:
    """Sharpness φ of f at x, in percent.

        φ = 100 · (max over z in C of f(x + A z) - f(x)) / (1 + f(x)),   C = {z : |z_i| ≤ ε (|(A⁺ x)_i| + 1)}

    A is the identity, or an n × p matrix of normal random numbers, and A⁺ its pseudo-inverse. L-BFGS-B seeks the
    maximum. It begins at a random point of the box, since the gradient at a minimum gives no direction. The largest
    loss seen counts, so φ is a lower bound of the true one, and never below 0.

    φ depends on how a network is parametrized: layers that are scaled against each other change φ and not the
    function (Dinh et al., 2017). Compare runs of one architecture.

    Args:
        loss: f and its gradient, such as a `FullLoss`.
        x: (n,) float64, the minimum.
        epsilon: ε > 0. The paper has 1e-3 and 5e-4.
        subspace: p; the paper has 100. None takes the whole space.
        iterations: of L-BFGS-B.
        seed: of A and of the point where the search begins.

    Raises:
        ConfigError: an argument is out of range, or memory is too small for the search.

    Source: Keskar, Mudigere, Nocedal, Smelyanskiy, Tang, "On large-batch training for deep learning", ICLR 2017.
    """
    if not epsilon > 0:
        raise ConfigError(f"epsilon is a size of a box, > 0; got {epsilon}")
    if subspace is not None and not 1 <= subspace <= x.size:
        raise ConfigError(f"subspace: 1 to {x.size:,} directions (the model's parameters); got {subspace:,}")
    _check_memory(x.size, subspace)
    try:
        from scipy.optimize import Bounds, minimize
    except ImportError as error:
        raise ConfigError(f"L-BFGS-B is SciPy's ({error}): pip install 'gradstream[analysis]'") from error
    rng = np.random.default_rng(seed)
    directions = None if subspace is None else rng.standard_normal((x.size, subspace))
    within = x if directions is None else np.linalg.solve(directions.T @ directions, directions.T @ x)
    bound = epsilon * (np.abs(within) + 1.0)
    begun, _ = loss(x)
    if not np.isfinite(begun):
        raise ConfigError(f"the loss of these parameters is {begun}; sharpness needs a finite one")
    largest, passes = begun, 1

    def below(z: Vector) -> tuple[float, Vector]:
        nonlocal largest, passes
        value, gradient = loss(x + (z if directions is None else directions @ z))
        passes += 1
        largest = max(largest, value)
        return -value, -(gradient if directions is None else directions.T @ gradient)

    minimize(
        below,
        rng.uniform(-bound, bound),
        jac=True,
        method="L-BFGS-B",
        bounds=Bounds(-bound, bound),
        options={"maxiter": iterations, "maxcor": MEMORY},
    )
    value = 100.0 * (largest - begun) / (1.0 + begun)
    return Sharpness(value, epsilon, subspace, begun, largest, passes)


def _check_memory(elems: int, subspace: int | None) -> None:
    """Raises ConfigError if the search does not fit into free memory."""
    needed = 8 * elems * (2 * MEMORY + 10 if subspace is None else subspace + 4)
    free = free_memory_bytes()
    if free is not None and needed > free:
        fewer = max(1, free // (8 * elems) - 4)
        raise ConfigError(
            f"the search needs {needed / 1e9:.1f} GB for {elems:,} parameters, and {free / 1e9:.1f} GB are free: "
            f"take {fewer:,} directions (subspace), or a machine with more memory"
        )
