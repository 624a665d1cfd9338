"""LARS: gradient descent with momentum, in which the norm of each layer sets the length of its step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from typing_extensions import override

from gradstream.optim._check import fraction, not_negative, positive
from gradstream.optim.base import BLOCK_ELEMS, Optimizer, PerTensor, State, Sums, square_sum
from gradstream.optim.schedules import Rate, check_rate
from gradstream.optim.sgd import SGD


@dataclass(frozen=True, slots=True)
class LARS(PerTensor):
    """Layer-wise adaptive rate scaling.

    Of each tensor of the model, with norms over the whole tensor::

        λ ← trust_coefficient · ‖w‖ / (‖g‖ + weight_decay · ‖w‖)      1 if ‖w‖ or the divisor is 0
        b ← momentum · b + λ · (g + weight_decay · w)                 first update: b ← λ · (g + weight_decay · w)
        w ← w - lr · b

    As in `SGD`, and unlike the paper, the velocity does not contain `lr`. The two are the same while lr is constant,
    and with the momentum correction of Goyal and others (2017) where it changes. Tensors of one dimension or none, as
    biases and the gains of norms, take SGD's step with λ = 1 and without weight decay, unless `skip_1d` is False.
    Parameter groups set other values by name: {"match": "embedding.*", "trust_coefficient": None}.

    Args:
        lr: learning rate, > 0; or a schedule (`optim.schedules`).
        momentum: share of the velocity kept from one update to the next, in [0, 1).
        weight_decay: L2 regularisation; its part of the gradient is scaled, too.
        trust_coefficient: how far one update may move a tensor in relation to its norm, at lr = 1 and without
            momentum, > 0; None sets λ = 1, which is `SGD`.
        skip_1d: whether tensors of at most one dimension take neither λ nor weight decay.

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        You, Gitman, Ginsburg, Large batch training of convolutional networks, 2017.

    Example:
        >>> weights, gradient = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
        >>> state = {"momentum_buffer": torch.zeros(2)}
        >>> gs.optim.LARS(lr=1.0, trust_coefficient=0.5).apply(weights, gradient, state, lr=1.0, step=1)
        >>> weights
        tensor([3.0000, 1.5000])
    """

    state_init: ClassVar[float] = 0.0

    lr: Rate = field()  # else the property of the protocol would be its default
    momentum: float = 0.9
    weight_decay: float = 0.0
    trust_coefficient: float | None = 0.001
    skip_1d: bool = True

    def __post_init__(self) -> None:
        check_rate("LARS", self.lr)
        fraction("LARS", "momentum", self.momentum)
        not_negative("LARS", "weight_decay", self.weight_decay)
        if self.trust_coefficient is not None:
            positive("LARS", "trust_coefficient", self.trust_coefficient)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The velocity, if there is momentum."""
        return ("momentum_buffer",) if self.momentum else ()

    @override
    def of(self, dimensions: int) -> Optimizer:
        if dimensions < 2 and self.skip_1d:
            return SGD(self.lr, self.momentum)
        return self if self.trust_coefficient is not None else self._sgd(1.0)

    def partial_sums(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, step: int
    ) -> Sums:
        """Σ w², Σ g²."""
        return (
            square_sum(*torch.split(parameters, BLOCK_ELEMS)),
            square_sum(*torch.split(gradient, BLOCK_ELEMS)),
        )

    @override
    def apply_with(
        self,
        sums: Sums,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        *,
        lr: float,
        step: int,
    ) -> None:
        ratio = self._ratio(*sums)
        scaled = gradient if ratio == 1.0 else gradient * ratio
        self._sgd(ratio).apply(parameters, scaled, state, lr=lr, step=step)

    def _ratio(self, parameters: float, gradient: float) -> float:
        norm = math.sqrt(parameters)
        divisor = math.sqrt(gradient) + self.weight_decay * norm
        if self.trust_coefficient is None or not norm or not divisor:
            return 1.0
        return self.trust_coefficient * norm / divisor

    def _sgd(self, ratio: float) -> SGD:
        return SGD(self.lr, self.momentum, weight_decay=self.weight_decay * ratio)
