"""Adagrad: a learning rate for each parameter, which falls with the sum of its squared gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.optim._check import not_negative, positive
from gradstream.optim.base import State
from gradstream.optim.schedules import Rate, check_rate


@dataclass(frozen=True, slots=True)
class Adagrad:
    """Scales each parameter's step by the root of the sum of its squared gradients.

    ::

        g ← g + weight_decay · w
        s ← s + g²
        w ← w - lr · g / (√s + eps)

    Args:
        lr: learning rate, > 0; or a schedule (`optim.schedules`).
        eps: keeps the quotient finite, > 0.
        initial_accumulator: initial value of s. If it is 0, the first step changes every parameter by lr;
            larger values make the first steps smaller.
        weight_decay: L2 regularisation.

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        Duchi, Hazan, Singer, Adaptive subgradient methods for online learning and stochastic
        optimization, 2011. The server's rule in Dean and others, Large scale distributed deep
        networks, 2012.

    Example:
        >>> weights, gradient = torch.ones(2), torch.tensor([1.0, 2.0])
        >>> state = {"sum": torch.zeros(2)}
        >>> gs.optim.Adagrad(lr=0.5).apply(weights, gradient, state, lr=0.5, step=1)
        >>> weights
        tensor([0.5000, 0.5000])
    """

    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    lr: Rate = 0.01
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_rate("Adagrad", self.lr)
        positive("Adagrad", "eps", self.eps)
        not_negative("Adagrad", "initial_accumulator", self.initial_accumulator)
        not_negative("Adagrad", "weight_decay", self.weight_decay)

    @property
    def state_init(self) -> float:
        """Initial value of the sum of squares."""
        return self.initial_accumulator

    @property
    def skips_zeros(self) -> bool:
        """True without weight decay."""
        return not self.weight_decay

    def apply(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """One update in place; see `Optimizer.apply`."""
        torch._fused_adagrad_(
            [parameters],
            [gradient],
            [state["sum"]],
            [torch.tensor(float(step))],
            lr=lr,
            lr_decay=0.0,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )

    def bounds_after(
        self, bounds: Mapping[str, float], gradient: float, *, lr: float, step: int
    ) -> dict[str, float]:
        """See `base.Bounded`."""
        length = gradient + self.weight_decay * bounds[""]
        # |g| / √s ≤ 1, since s contains g²; 2 where g² is so small that most of it is rounded away.
        return {"": bounds[""] + 2 * lr, "sum": bounds["sum"] + length**2}
