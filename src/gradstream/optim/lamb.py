"""LAMB: AdamW, in which the norm of each layer sets the length of its step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from gradstream.optim._check import fraction, not_negative, positive
from gradstream.optim.adam import Adam, AdamW
from gradstream.optim.base import BLOCK_ELEMS, Optimizer, PerTensor, State, Sums, square_sum
from gradstream.optim.schedules import Rate, check_rate


@dataclass(frozen=True, slots=True)
class LAMB(PerTensor):
    """Layer-wise adaptive moments for batch training.

    Of each tensor of the model, with norms over the whole tensor::

        m ← beta1 · m + (1 - beta1) · g
        v ← beta2 · v + (1 - beta2) · g²
        r = m / (1 - beta1^t) / (√(v / (1 - beta2^t)) + eps) + weight_decay · w       t = step, from 1
        w ← w - lr · ρ · r,     ρ = φ(‖w‖) / ‖r‖,  φ(z) = min(max(z, norm_min), norm_max)    1 if φ(‖w‖) or ‖r‖ is 0

    φ is the identity by default. Tensors of one dimension or none, as biases and the gains of norms, take Adam's step
    with ρ = 1 and without weight decay, unless `skip_1d` is False. Parameter groups set other values by name:
    {"match": "embedding.*", "trust": False}. Some implementations also clip the gradient of the whole model to norm 1
    first; the paper does not.

    Args:
        lr: learning rate, > 0; or a schedule (`optim.schedules`).
        beta1, beta2, eps: as for `Adam`.
        weight_decay: λ of the decay that is added to Adam's step, as in AdamW.
        trust: False sets ρ = 1, which is `AdamW`.
        norm_min, norm_max: bounds of φ, >= 0; norm_max=None is no bound.
        skip_1d: whether tensors of at most one dimension take neither ρ nor weight decay.

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        You, Li, Reddi and others, Large batch optimization for deep learning: training BERT in 76 minutes, 2020.

    Example:
        >>> weights, gradient = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
        >>> state = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
        >>> gs.optim.LAMB(weight_decay=0.0).apply(weights, gradient, state, lr=0.1, step=1)
        >>> weights
        tensor([3.0000, 3.5000])
    """

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    state_init: ClassVar[float] = 0.0

    lr: Rate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    trust: bool = True
    norm_min: float = 0.0
    norm_max: float | None = None
    skip_1d: bool = True

    def __post_init__(self) -> None:
        check_rate("LAMB", self.lr)
        fraction("LAMB", "beta1", self.beta1)
        fraction("LAMB", "beta2", self.beta2)
        positive("LAMB", "eps", self.eps)
        not_negative("LAMB", "weight_decay", self.weight_decay)
        not_negative("LAMB", "norm_min", self.norm_min)
        if self.norm_max is not None:
            positive("LAMB", "norm_max", self.norm_max)

    @override
    def of(self, dimensions: int) -> Optimizer:
        if dimensions < 2 and self.skip_1d:
            return Adam(self.lr, self.beta1, self.beta2, self.eps)
        return self if self.trust else self._adamw

    def partial_sums(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, step: int
    ) -> Sums:
        """Σ w², Σ r²: r is the step of Adam's own kernel from 0 at rate 1, with copies of its state."""
        adam = Adam(1.0, self.beta1, self.beta2, self.eps)
        size = min(BLOCK_ELEMS, len(parameters))
        zero, m, v = (parameters.new_empty(size) for _ in range(3))
        lengths: list[float] = []
        for start in range(0, len(parameters), size):
            block = slice(start, min(start + size, len(parameters)))
            elems = block.stop - start
            step_back, copies = zero[:elems].zero_(), {"exp_avg": m[:elems], "exp_avg_sq": v[:elems]}
            for name, copy in copies.items():
                copy.copy_(state[name][block])
            adam.apply(step_back, gradient[block], copies, lr=1.0, step=step)
            lengths.append(square_sum(step_back.sub_(parameters[block], alpha=self.weight_decay)))
        return square_sum(*torch.split(parameters, BLOCK_ELEMS)), math.fsum(lengths)

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
        """See `PerTensor.apply_with`: AdamW's update at the rate lr · ρ."""
        self._adamw.apply(parameters, gradient, state, lr=lr * self._ratio(*sums), step=step)

    def _ratio(self, parameters: float, step_length: float) -> float:
        norm = max(math.sqrt(parameters), self.norm_min)
        norm = norm if self.norm_max is None else min(norm, self.norm_max)
        if not self.trust or not norm or not step_length:
            return 1.0
        return norm / math.sqrt(step_length)

    @property
    def _adamw(self) -> AdamW:
        return AdamW(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay)
