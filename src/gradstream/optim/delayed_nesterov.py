"""Nesterov's momentum for outer gradients that come one by one: the velocity moves once in N of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.optim._check import fraction, require
from gradstream.optim.base import State
from gradstream.optim.schedules import Rate, check_rate


@dataclass(frozen=True, slots=True)
class DelayedNesterov:
    """Gradient descent at each gradient, and a step by the velocity at each N-th.

    ::

        p ← p + g
        w ← w - lr · g
        at each N-th:  v ← momentum · v + p;  w ← w - lr · momentum · v;  p ← 0

    With N = 1 it is `SGD(lr, momentum=momentum, nesterov=True)`. W workers that push one after the other move a
    velocity W times where one synchronous step moves it once, by a sum that is W times as long: updates swing.

    Args:
        lr: learning rate, > 0.
        momentum: share of the velocity that is kept, in [0, 1).
        every: N, gradients between two moves of the velocity, at least 1.

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        Liu, Chhaparia, Douillard and others, Asynchronous local-SGD training for language modeling, 2024, Algorithm 3
        with c = 0. There g is divided by N; here whoever gives the gradients divides them.
    """

    state_init: ClassVar[float] = 0.0

    lr: Rate
    momentum: float = 0.9
    every: int = 4

    def __post_init__(self) -> None:
        check_rate("DelayedNesterov", self.lr)
        fraction("DelayedNesterov", "momentum", self.momentum)
        require(self.every >= 1, "DelayedNesterov", "every", self.every, "at least 1")

    @property
    def state_names(self) -> tuple[str, ...]:
        """The velocity v, and the sum p of the gradients since it moved; none without momentum."""
        return ("momentum_buffer", "pending") if self.momentum else ()

    def apply(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """One update in place; see `Optimizer.apply`."""
        parameters.add_(gradient, alpha=-lr)
        if not self.momentum:
            return
        velocity, pending = state["momentum_buffer"], state["pending"].add_(gradient)
        if step % self.every == 0:
            velocity.mul_(self.momentum).add_(pending)
            parameters.add_(velocity, alpha=-lr * self.momentum)
            pending.zero_()
