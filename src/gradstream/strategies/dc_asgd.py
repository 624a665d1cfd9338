"""DC-ASGD: asynchronous SGD whose server corrects each stale gradient for the parameters that it is applied to.

    client m:                           server, on a gradient g of worker m, computed on w_bak:
      w ← fetch()                         w ← w - η·(g + λ·g⊙g⊙(w - w_bak))
      push(∇ℓ(w; batch))                adaptive:
                                          v_m ← d·v_m + (1 - d)·g⊙g,   λ = λ₀ / √(v_m + ε)

The gradient at w is the gradient at w_bak plus the Hessian times w - w_bak, the distance that the server has moved
meanwhile. λ·g⊙g approximates the Hessian: the mean of g⊙g over samples is the Hessian's diagonal if the loss is a
negative log-likelihood and the model is near the truth. Here g is the mean over a minibatch of b samples, and its
square is smaller. So tune λ like a rate, unless it is adaptive: λ·g⊙g is then about λ₀·|g|, whatever the scale of the
gradients.

A gradient that no other has overtaken (w = w_bak) is used unchanged, so one worker is plain SGD. λ = 0 is
asynchronous SGD. The shards keep a copy of the parameters that each worker computes on: N elements for each
worker, 2N with `overlap`, and v_m besides where λ is adaptive. Bytes a step and worker, as in
asynchronous SGD: 4N up, 4N down (float32). A dead worker stops no other.

Reference: Zheng, Meng, Wang, Chen, Yu, Ma, Liu, "Asynchronous stochastic gradient descent with delay
compensation", ICML 2017, Algorithms 1 and 2, §5. Different here: the shards keep w_bak chunk by chunk, of the
version that the gradient was computed on, even where its worker has fetched another one since; the update rule may
be another than SGD, and then gets the corrected gradient; v_m is a mean square for each worker m, of that worker's
gradients alone, as in the authors' code, where Algorithm 2 writes one MeanSquare(t) without m.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.errors import ConfigError
from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, Correction, EveryPush
from gradstream.strategies.base import check_not_negative
from gradstream.strategies.together import StaleGradients

DECAY, EPS = 0.95, 1e-7
"""Defaults of d and ε."""

BLOCK_ELEMS = 1 << 17
"""Four float32 vectors of this length, 2 MiB, stay in the processor's cache over several operations."""


@dataclass(frozen=True, slots=True)
class Compensation:
    """g + λ·g⊙g⊙(w - w_bak), in the memory of w_bak; λ is a number, or λ₀ / √(v + ε) element by element.

    Args:
        strength: λ or λ₀.
        decay: d, in v ← d·v + (1 - d)·g⊙g; None for a constant λ.
        eps: ε.
    """

    strength: float
    decay: float | None = None
    eps: float = EPS

    @property
    def state_names(self) -> Sequence[str]:
        """The mean square v, if λ is adaptive."""
        return () if self.decay is None else ("mean square",)

    def correct(
        self,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        base: torch.Tensor,
        state: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """See `Correction`."""
        for start in range(0, len(gradient), BLOCK_ELEMS):
            block = slice(start, start + BLOCK_ELEMS)
            g, there = gradient[block], base[block]
            torch.sub(parameters[block], there, out=there).mul_(g).mul_(g)
            if self.decay is not None:
                v = state["mean square"][block].mul_(self.decay).addcmul_(g, g, value=1 - self.decay)
                there.div_(v.add(self.eps).sqrt_())
            torch.add(g, there, alpha=self.strength, out=there)
        return base


@dataclass(frozen=True, slots=True)
class DCASGD(StaleGradients):
    """Delay-compensated asynchronous SGD; see the module.

    Args:
        adaptive: True lets λ follow the size of the gradients, element by element (DC-ASGD-a); with False it is
            constant (DC-ASGD-c).
        strength: λ₀ or λ, at least 0; 0 corrects nothing. None is 2 where λ is adaptive, else 0.04.
        decay: d of the mean square, in [0, 1), where λ is adaptive.
        eps: ε, > 0, where λ is adaptive.
        overlap: fetch while computing, at the price of one more step of delay.

    Example:
        >>> strategy = gs.strategies.DCASGD(strength=0.1, adaptive=False)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["staleness_max"]
        1
    """

    adaptive: bool = True
    strength: float | None = None
    decay: float = DECAY
    eps: float = EPS
    overlap: bool = False

    plain: ClassVar[Mapping[str, object] | None] = {"overlap": False}

    def __post_init__(self) -> None:
        if self.strength is not None:
            check_not_negative("DCASGD", "strength", self.strength)
        if not 0 <= self.decay < 1:
            raise ConfigError(f"DCASGD(decay={self.decay}): expected 0 or more, below 1")
        if not 0 < self.eps < float("inf"):
            raise ConfigError(f"DCASGD(eps={self.eps}): expected a finite number above 0")
        if not self.adaptive and (self.decay, self.eps) != (DECAY, EPS):
            raise ConfigError(
                f"DCASGD(adaptive=False, decay={self.decay}, eps={self.eps}): a constant λ has no mean "
                "square; leave decay and eps out"
            )

    def optimizer(self) -> Optimizer:
        """SGD, as in the paper."""
        return SGD(lr=0.01)

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """Each push is one update, in the order of arrival."""
        return EveryPush()

    def correction(self) -> Correction | None:
        """See `Compensation`; None if λ = 0."""
        strength = (2.0 if self.adaptive else 0.04) if self.strength is None else self.strength
        return Compensation(strength, self.decay if self.adaptive else None, self.eps) if strength else None
