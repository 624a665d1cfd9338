"""Adam and AdamW: steps from running means of the gradient and of its square."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from gradstream.optim._check import fraction, not_negative, positive
from gradstream.optim.base import State
from gradstream.optim.schedules import Rate, check_rate


@dataclass(frozen=True, slots=True)
class Adam:
    """Momentum and a scale for each parameter, both corrected for their start at 0.

    ::

        g ← g + weight_decay · w
        m ← beta1 · m + (1 - beta1) · g
        v ← beta2 · v + (1 - beta2) · g²
        w ← w - lr · m / (1 - beta1^t) / (√(v / (1 - beta2^t)) + eps)      t = step, from 1

    Args:
        lr: learning rate, > 0; or a schedule (`optim.schedules`).
        beta1: memory of the mean, in [0, 1).
        beta2: memory of the mean square, in [0, 1).
        eps: keeps the quotient finite, > 0.
        weight_decay: L2 regularisation, scaled like the rest of the gradient.

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        Kingma, Ba, Adam: a method for stochastic optimization, 2015.

    Example:
        >>> weights, gradient = torch.ones(2), torch.tensor([1.0, 2.0])
        >>> state = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
        >>> gs.optim.Adam(lr=0.5).apply(weights, gradient, state, lr=0.5, step=1)
        >>> weights
        tensor([0.5000, 0.5000])
    """

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    state_init: ClassVar[float] = 0.0

    lr: Rate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        rule = type(self).__name__
        check_rate(rule, self.lr)
        fraction(rule, "beta1", self.beta1)
        fraction(rule, "beta2", self.beta2)
        positive(rule, "eps", self.eps)
        not_negative(rule, "weight_decay", self.weight_decay)

    def apply(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """One update in place; see `Optimizer.apply`."""
        self._update(torch._fused_adam_, parameters, gradient, state, lr, step)

    def bounds_after(
        self, bounds: Mapping[str, float], gradient: float, *, lr: float, step: int
    ) -> dict[str, float]:
        """See `base.Bounded`."""
        return self._bounds_after(bounds, gradient + self.weight_decay * bounds[""], bounds[""], lr, step)

    def _bounds_after(
        self, bounds: Mapping[str, float], gradient: float, parameters: float, lr: float, step: int
    ) -> dict[str, float]:
        mean = self.beta1 * bounds["exp_avg"] + (1 - self.beta1) * gradient
        square = self.beta2 * bounds["exp_avg_sq"] + (1 - self.beta2) * gradient**2
        ratio = mean / (1 - self.beta1**step) / self.eps
        if (decay := self.beta1**2 / self.beta2 if self.beta2 else 1.0) < 1:
            # |m| ≤ (1 - beta1) · Σ beta1^i |gᵢ|, and v = (1 - beta2) · Σ beta2^i gᵢ²: by Cauchy and Schwarz; 1 more
            # for squares so small that most of them is rounded away.
            root = (1 - self.beta1) / math.sqrt((1 - self.beta2) * (1 - decay))
            ratio = min(ratio, 1 + root * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step))
        return {"": parameters + lr * ratio, "exp_avg": mean, "exp_avg_sq": square}

    def _update(
        self,
        kernel: Callable[..., object],
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        lr: float,
        step: int,
    ) -> None:
        kernel(
            [parameters],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [torch.tensor(float(step))],
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """Adam with the weight decay kept out of the gradient and its scaling.

    ::

        w ← w - lr · weight_decay · w, then Adam's update with weight_decay = 0

    Args:
        lr, beta1, beta2, eps: as for `Adam`.
        weight_decay: share of each parameter that is taken away per unit of learning rate.

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        Loshchilov, Hutter, Decoupled weight decay regularization, 2019.

    Example:
        >>> optimizer = gs.optim.AdamW(lr=1e-3, weight_decay=0.1)
        >>> run = gs.simulate(model, data, optimizer=optimizer, workers=2, batch_size=8, epochs=2)
        >>> run.summary["optimizer"]
        'adamw'
    """

    weight_decay: float = 0.01

    def apply(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """One update in place; see `Optimizer.apply`."""
        self._update(torch._fused_adamw_, parameters, gradient, state, lr, step)

    @override
    def bounds_after(
        self, bounds: Mapping[str, float], gradient: float, *, lr: float, step: int
    ) -> dict[str, float]:
        return self._bounds_after(bounds, gradient, abs(1 - lr * self.weight_decay) * bounds[""], lr, step)
