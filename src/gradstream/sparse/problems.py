"""Sparse problems: linear classifiers and regression, and matrix completion.

L2 regularisation covers touched components alone, as in the paper:

    l2/2 |w|² = 1/n Σ_i l2/2 Σ_{v∈e} (n/d_v)·w_v²      where d_v samples touch v

It is exact in expectation, and needs η·l2·n/d_v < 1 for the rarest component.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gradstream.errors import ConfigError, UnknownNameError
from gradstream.model.base import Layout
from gradstream.sparse.data import CsrTable, SparseRows
from gradstream.sparse.model import Gradient, SparseModel, Touched

Array = np.ndarray[Any, Any]


def _logistic(margin: float, target: float) -> tuple[float, float]:
    """log(1 + e^(-y·m)) and its derivative by m, for y = ±1 as targets 1 and 0."""
    y = 1.0 if target > 0 else -1.0
    z = -y * margin
    if z > 0:
        grown = math.exp(-z)
        return z + math.log1p(grown), -y / (1 + grown)
    grown = math.exp(z)
    return math.log1p(grown), -y * grown / (1 + grown)


def _hinge(margin: float, target: float) -> tuple[float, float]:
    """max(0, 1 - y·m) and a subgradient."""
    y = 1.0 if target > 0 else -1.0
    short = 1.0 - y * margin
    return (short, -y) if short > 0 else (0.0, 0.0)


def _squared(margin: float, target: float) -> tuple[float, float]:
    """(m - y)²/2 and its derivative."""
    error = margin - target
    return 0.5 * error * error, error


LOSSES: Mapping[str, Callable[[float, float], tuple[float, float]]] = {
    "logistic": _logistic,
    "hinge": _hinge,
    "squared": _squared,
}


def linear(num_features: int, *, loss: str = "logistic", l2: float = 0.0) -> SparseModel:
    """The model w·x: logistic regression, the linear support vector machine of the paper, or least squares.

    Args:
        num_features: d; the parameters are {"w": (d,)}, and begin at 0.
        loss: "logistic", "hinge" or "squared".
        l2: λ of λ/2 |w|² in the mean loss; see the module.

    Raises:
        UnknownNameError: there is no such loss.
        ConfigError: l2 is negative, or there are no features.
    """
    if loss not in LOSSES:
        raise UnknownNameError("loss of a sparse linear model", loss, LOSSES)
    if not 0 <= l2 < math.inf or num_features < 1:
        raise ConfigError(f"linear({num_features}, l2={l2}): expected at least 1 feature, and l2 >= 0")
    layout = Layout.of([("w", (num_features,))], torch.float32)
    return SparseModel(
        layout, lambda: _linear_functions(loss, float(l2)), _longest, _margins, classes=loss != "squared"
    )


def _touched_row(table: Any, i: int, where: Any) -> int:
    # An index into a slice needs no check of its sign.
    features = table.indices[table.indptr[i] : table.indptr[i + 1]]
    for j in range(len(features)):
        where[j] = features[j]
    return len(features)


@functools.cache
def _linear_functions(loss: str, l2: float) -> tuple[Touched, Gradient]:
    from gradstream.sparse.atomics import compiled

    link, regular = compiled(LOSSES[loss]), l2 > 0

    def gradient(w: Any, table: Any, i: int, where: Any, count: int, into: Any) -> float:
        x = table.values[table.indptr[i] : table.indptr[i + 1]]
        margin, penalty = 0.0, 0.0
        for j in range(count):
            margin += w[where[j]] * x[j]
        value, derivative = link(margin, table.targets[i])
        slope = np.float32(derivative)
        for j in range(count):
            into[j] = slope * x[j]
            if regular:
                at = w[where[j]]
                pull = l2 * table.scale[where[j]] * at
                into[j] += pull
                penalty += 0.5 * pull * at
        return value + penalty

    return _touched_row, gradient


def _longest(table: CsrTable) -> int:
    return int(np.diff(table.indptr).max(initial=0))


def _margins(w: Array, rows: SparseRows) -> Array:
    table, ids = rows.table, rows.ids
    begins, sizes = table.indptr[ids], table.indptr[ids + 1] - table.indptr[ids]
    owner = np.repeat(np.arange(len(ids)), sizes)
    at = np.repeat(begins - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes) + np.arange(sizes.sum())
    products = w[table.indices[at]] * table.values[at]
    return np.bincount(owner, products, minlength=len(ids)).astype(np.float32)


# ---- matrix completion ------------------------------------------------------------------------


def matrix_completion(
    shape: tuple[int, int], rank: int, *, l2: float = 0.0, spread: float | None = None
) -> SparseModel:
    """A matrix L·Rᵀ of low rank through its known entries: 1/n Σ (L_i·R_j - M_ij)²/2 + l2/2 (|L|² + |R|²).

    An entry touches one row of L and one of R. Data are made by `from_ratings`.

    Args:
        shape: (m, k) of the matrix; the parameters are {"L": (m, rank), "R": (k, rank)}.
        rank: r.
        l2: λ of the regularisation, over touched rows; see the module.
        spread: standard deviation of the initial factors; None takes 1/√r.

    Raises:
        ConfigError: a number is out of range.
    """
    if min(*shape, rank) < 1 or not 0 <= l2 < math.inf:
        raise ConfigError(f"matrix_completion({shape}, {rank}, l2={l2}): expected sizes from 1 and l2 >= 0")
    layout = Layout.of([("L", (shape[0], rank)), ("R", (shape[1], rank))], torch.float32)
    deviation = 1 / math.sqrt(rank) if spread is None else spread

    def start(seed: int, parameters: torch.Tensor) -> None:
        drawn = np.random.default_rng(seed).standard_normal(len(parameters), np.float32)
        parameters.copy_(torch.from_numpy(drawn * np.float32(deviation)))

    def scores(w: Array, rows: SparseRows) -> Array:
        factors = w.reshape(-1, rank)
        first = rows.table.indptr[rows.ids]
        pairs = factors[rows.table.indices[first]] * factors[rows.table.indices[first + 1]]
        return np.asarray(pairs.sum(axis=1))

    return SparseModel(layout, lambda: _factors_of(rank, float(l2)), lambda _: 2 * rank, scores, start)


@functools.cache
def _factors_of(rank: int, l2: float) -> tuple[Touched, Gradient]:
    regular = l2 > 0

    def touched(table: Any, i: int, where: Any) -> int:
        first = table.indptr[i]
        for side in range(2):
            row = table.indices[first + side]
            for j in range(rank):
                where[side * rank + j] = row * rank + j
        return 2 * rank

    def gradient(w: Any, table: Any, i: int, where: Any, count: int, into: Any) -> float:
        product, penalty = 0.0, 0.0
        for j in range(rank):
            product += w[where[j]] * w[where[rank + j]]
        error = product - table.targets[i]
        first = table.indptr[i]
        for side in range(2):
            other, pull = (1 - side) * rank, 0.0
            if regular:
                pull = l2 * table.scale[table.indices[first + side]]
            for j in range(rank):
                at = w[where[side * rank + j]]
                into[side * rank + j] = error * w[where[other + j]] + pull * at
                penalty += 0.5 * pull * at * at
        return float(0.5 * error * error + penalty)

    return touched, gradient
