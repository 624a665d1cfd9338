"""Muon: the momentum of each weight matrix, made nearly orthogonal; AdamW for all other parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.optim._check import fraction, not_negative, positive, require
from gradstream.optim.adam import AdamW
from gradstream.optim.base import Optimizer, State
from gradstream.optim.schedules import Rate, check_rate

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of Jordan's iteration: steepest at 0, so that five steps bring small singular values near 1."""


@dataclass(frozen=True, slots=True)
class Muon:
    """Momentum, orthogonalised by Newton and Schulz's iteration.

    Of each matrix, a tensor of two dimensions (R, C)::

        b ← momentum · b + (1 - momentum) · g
        u ← (1 - momentum) · g + momentum · b                       nesterov; else u ← b
        X ← u / ‖u‖;  5 times: A = X·Xᵀ,  X ← 3.4445·X + (-4.775·A + 2.0315·A²)·X       of uᵀ if R > C
        w ← (1 - lr · weight_decay) · w - lr · √max(1, R/C) · X

    As in `torch.optim.Muon`, but in the dtype of the parameters, where torch iterates in bfloat16. All other tensors
    take AdamW's step at the same learning rate. So do the matrices that a parameter group excepts, as it should
    embeddings and the output layer: {"match": "head.*", "orthogonal": False, "lr_scale": 0.1}.

    A matrix must be whole where it is updated: under allreduce, or where workers have parameters of their own.

    Args:
        lr: learning rate, > 0; or a schedule (`optim.schedules`).
        momentum: memory of the mean gradient of a matrix, in [0, 1).
        nesterov: uses Nesterov's momentum.
        weight_decay: share of each parameter that is taken away per unit of learning rate.
        orthogonal: False takes AdamW's step for matrices, too, which is `AdamW`.
        beta1, beta2, eps: of AdamW's step.

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        Jordan and others, Muon: an optimizer for hidden layers in neural networks, 2024.

    Example:
        >>> weights, gradient = torch.zeros(2, 2), torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        >>> state = {"exp_avg": torch.zeros(2, 2), "exp_avg_sq": torch.zeros(2, 2)}
        >>> gs.optim.Muon(lr=1.0).apply_matrix(weights, gradient, state, lr=1.0, step=1)
        >>> bool((weights.diag() < -0.6).all()), weights[0, 1].item()
        (True, 0.0)
    """

    # A matrix has its momentum in the first, and does not use the second.
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    state_init: ClassVar[float] = 0.0

    lr: Rate = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    orthogonal: bool = True
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_rate("Muon", self.lr)
        for name in ("momentum", "beta1", "beta2"):
            fraction("Muon", name, getattr(self, name))
        for name in ("nesterov", "orthogonal"):
            require(isinstance(getattr(self, name), bool), "Muon", name, getattr(self, name), "True or False")
        not_negative("Muon", "weight_decay", self.weight_decay)
        positive("Muon", "eps", self.eps)

    def of(self, dimensions: int) -> Optimizer:
        """See `ByShape.of`."""
        return self if dimensions == 2 and self.orthogonal else self._adamw

    def apply(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """AdamW's update, of elements that belong to no matrix; see `Optimizer.apply`."""
        self._adamw.apply(parameters, gradient, state, lr=lr, step=step)

    def apply_matrix(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """See `PerMatrix.apply_matrix`."""
        mean = state["exp_avg"].lerp_(gradient, 1 - self.momentum)
        step_of_matrix = orthogonal(gradient.lerp(mean, self.momentum) if self.nesterov else mean)
        rows, columns = parameters.shape
        parameters.mul_(1 - lr * self.weight_decay)
        parameters.add_(step_of_matrix, alpha=-lr * math.sqrt(max(1.0, rows / columns)))

    @property
    def _adamw(self) -> AdamW:
        return AdamW(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay)


def orthogonal(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """U·S'·Vᵀ of a matrix U·S·Vᵀ, with singular values S' of about 0.7 to 1.2; zeros for zeros."""
    a, b, c = QUINTIC
    tall = len(matrix) > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
