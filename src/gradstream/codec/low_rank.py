"""`PowerSGD`: the gradient of each matrix as the product of two thin matrices, which can be summed.

    M = Σ_i M_i  (R, C):     P ← Σ_i M_i·Q;   P ← orthonormal(P);   Q ← Σ_i M_iᵀ·P;   M ≈ P·Qᵀ       P (R, r), Q (C, r)

One step of the power method from the Q of the previous round. Each worker multiplies its own part of the gradient, so
two allreduces of thin matrices replace one of M: any algorithm of the group can be used, and unlike with other codecs,
the number of bytes does not grow with the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gradstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MatrixPlace:
    """A tensor of two or more dimensions in the flat vector, as a matrix of its first dimension by all others.

    Args:
        start: first element.
        rows, columns: R and C.
    """

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """Its end."""
        return self.start + self.rows * self.columns

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The view (R, C) in a flat vector."""
        return flat[self.start : self.stop].view(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Low-rank gradients with error feedback, for workers that sum in a group.

    Each worker adds to its part of a matrix what was dropped from earlier ones: X_i = M_i + e_i. With P as above,
    e_i ← X_i - P·(X_iᵀ·P)ᵀ: the sum of all e_i and of the P·Qᵀ of all rounds is the sum of all gradients.
    Tensors of one dimension, and matrices that the two thin ones would not make smaller, are summed as they are.

    Args:
        rank: r, at least 1. 4r(R + C) bytes a matrix in place of 4RC.

    Raises:
        ConfigError: a smaller rank.

    Reference:
        Vogels, Karimireddy, Jaggi, PowerSGD: practical low-rank gradient compression for distributed optimization,
        2019.

    Example:
        >>> strategy, codec = gs.AllReduce(), gs.codecs.PowerSGD(rank=1)
        >>> run = gs.simulate(model, data, strategy=strategy, codec=codec, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"]
        16
    """

    rank: int = 2

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"PowerSGD: rank is {self.rank!r}; expected a whole number of at least 1")

    def matrices(self, tensors: Iterable[tuple[int, tuple[int, ...]]]) -> list[MatrixPlace]:
        """The tensors that are sent as two thin matrices, of (first element, shape) of all."""
        found = [
            MatrixPlace(start, shape[0], math.prod(shape[1:])) for start, shape in tensors if len(shape) > 1
        ]
        return [one for one in found if self.rank * (one.rows + one.columns) < one.rows * one.columns]


def orthonormal(thin: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns of (R, r), and of more columns where these are not independent."""
    basis: torch.Tensor = torch.linalg.qr(thin).Q
    return basis
