"""Stochastic gradient descent: plain, with momentum, with Nesterov's momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.optim._check import fraction, not_negative, require
from gradstream.optim.base import State
from gradstream.optim.schedules import Rate, check_rate


@dataclass(frozen=True, slots=True)
class SGD:
    """Gradient descent, optionally with momentum, in PyTorch's conventions.

    ::

        g ← g + weight_decay · w
        b ← momentum · b + (1 - dampening) · g      (first update: b ← g)
        w ← w - lr · g                              momentum = 0
        w ← w - lr · b                              momentum > 0
        w ← w - lr · (g + momentum · b)             nesterov

    Args:
        lr: learning rate, > 0; or a schedule (`optim.schedules`).
        momentum: share of the velocity kept from one update to the next, in [0, 1).
        dampening: share of the gradient that does not enter the velocity.
        nesterov: uses Nesterov's momentum; needs momentum > 0 and dampening = 0.
        weight_decay: L2 regularisation: the gradient of weight_decay/2 · |w|² is added.

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        Sutskever, Martens, Dahl, Hinton, On the importance of initialization and momentum in deep
        learning, 2013. As in PyTorch, and unlike that paper, the velocity does not contain `lr`.

    Example:
        >>> weights, gradient = torch.ones(2), torch.tensor([1.0, 2.0])
        >>> gs.optim.SGD(lr=0.5).apply(weights, gradient, {}, lr=0.5, step=1)
        >>> weights
        tensor([0.5000, 0.0000])
    """

    state_init: ClassVar[float] = 0.0

    lr: Rate
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_rate("SGD", self.lr)
        fraction("SGD", "momentum", self.momentum)
        fraction("SGD", "dampening", self.dampening)
        not_negative("SGD", "weight_decay", self.weight_decay)
        if self.nesterov:
            require(self.momentum > 0, "SGD", "momentum", self.momentum, "> 0 with nesterov=True")
            require(self.dampening == 0, "SGD", "dampening", self.dampening, "0 with nesterov=True")

    @property
    def state_names(self) -> tuple[str, ...]:
        """The velocity, if there is momentum."""
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def skips_zeros(self) -> bool:
        """True without momentum and weight decay."""
        return not self.momentum and not self.weight_decay

    def apply(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """One update in place; see `Optimizer.apply`."""
        torch._fused_sgd_(
            [parameters],
            [gradient],
            [state["momentum_buffer"]] if self.momentum else [],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=self.dampening,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=step == 1,
        )

    def bounds_after(
        self, bounds: Mapping[str, float], gradient: float, *, lr: float, step: int
    ) -> dict[str, float]:
        """See `base.Bounded`."""
        # The first update sets the velocity to g, whatever the dampening.
        length = gradient + self.weight_decay * bounds[""]
        if not self.momentum:
            return {"": bounds[""] + lr * length}
        velocity = self.momentum * bounds["momentum_buffer"] + length
        step_length = length + self.momentum * velocity if self.nesterov else velocity
        return {"": bounds[""] + lr * step_length, "momentum_buffer": velocity}


def Momentum(lr: Rate, momentum: float = 0.9, *, weight_decay: float = 0.0) -> SGD:  # noqa: N802  reads as a rule
    """Gradient descent with momentum (Polyak, 1964): `SGD` with 0.9 of the velocity kept."""
    return SGD(lr, momentum=momentum, weight_decay=weight_decay)


def Nesterov(lr: Rate, momentum: float = 0.9, *, weight_decay: float = 0.0) -> SGD:  # noqa: N802  reads as a rule
    """Nesterov's accelerated gradient (1983), in the form of Sutskever and others (2013)."""
    return SGD(lr, momentum=momentum, nesterov=True, weight_decay=weight_decay)
