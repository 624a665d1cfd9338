"""DC-ASGD: asynchronous SGD whose server moves each stale gradient to the parameters that it meets.

    client m:                           server, on a gradient g of worker m, computed on w_bak:
      w ← fetch()                         w ← w - η·(g + λ·g⊙g⊙(w - w_bak))
      push(∇ℓ(w; batch))                adaptive:
                                          v_m ← d·v_m + (1 - d)·g⊙g,   λ = λ₀ / √(v_m + ε)

The gradient at w is that at w_bak plus the Hessian times how far the server has gone meanwhile; g⊙g stands
in the Hessian's place. That is its diagonal in the mean, where the loss is the negative logarithm of a
likelihood and the model is near the truth; for one sample, not for the mean over b, whose square is smaller.
So λ is to be tuned like a rate, unless it is adaptive: λ·g⊙g is then about λ₀·|g|, whatever their scale.

Where nothing has overtaken a gradient, w = w_bak, it is used as it is: one worker is plain SGD. λ = 0 is
asynchronous SGD. The shards keep a copy of what they have given each worker: N elements for each, 2N with
`overlap`; adaptive keeps v_m besides. Bytes a step and worker are those of asynchronous SGD: 4N up,
4N down (float32). A dead worker stops nobody.

Reference: Zheng, Meng, Wang, Chen, Yu, Ma, Liu, "Asynchronous stochastic gradient descent with delay
compensation", ICML 2017, Algorithms 1 and 2, §5. Different here: w_bak is kept chunk by chunk, of the version
that the gradient was computed on, whatever else its worker was given since; the update rule may be
another than SGD, which then gets the compensated gradient; and v_m is a mean square for each worker m, of
its own gradients alone, as in the authors' code, where Algorithm 2 writes one MeanSquare(t) without m.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError
from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, EveryPush
from gradstream.server.correction import Correction
from gradstream.strategies.api import Worker
from gradstream.strategies.base import Strategy
from gradstream.strategies.checks import check_not_negative

__all__ = ["DCASGD", "AdaptiveCompensation", "Compensation"]

DECAY, EPS = 0.95, 1e-7
"""d and ε, where they are not given."""

BLOCK_ELEMS = 1 << 17  # of four float32 vectors: 2 MiB


def _blocks(elems: int) -> list[slice]:
    """Parts that stay in the processor's cache while several operations go over them."""
    return [slice(start, start + BLOCK_ELEMS) for start in range(0, elems, BLOCK_ELEMS)]


@dataclass(frozen=True, slots=True)
class Compensation:
    """g + λ·g⊙g⊙(w - w_bak), in the memory of w_bak.

    Args:
        strength: λ.
    """

    strength: float
    state_names: ClassVar[Sequence[str]] = ()

    def correct(
        self,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        basis: torch.Tensor,
        state: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """See `Correction`."""
        for block in _blocks(len(gradient)):
            g, there = gradient[block], basis[block]
            torch.sub(parameters[block], there, out=there).mul_(g).mul_(g)
            torch.add(g, there, alpha=self.strength, out=there)
        return basis


@dataclass(frozen=True, slots=True)
class AdaptiveCompensation:
    """v ← d·v + (1 - d)·g⊙g;  g + λ₀ / √(v + ε)·g⊙g⊙(w - w_bak), in the memory of w_bak.

    Args:
        strength: λ₀.
        decay: d.
        eps: ε.
    """

    strength: float
    decay: float
    eps: float
    state_names: ClassVar[Sequence[str]] = ("mean square",)

    def correct(
        self,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        basis: torch.Tensor,
        state: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """See `Correction`."""
        for block in _blocks(len(gradient)):
            g, there, mean_square = gradient[block], basis[block], state["mean square"][block]
            mean_square.mul_(self.decay).addcmul_(g, g, value=1 - self.decay)
            torch.sub(parameters[block], there, out=there).mul_(g).mul_(g)
            there.div_(mean_square.add(self.eps).sqrt_())
            torch.add(g, there, alpha=self.strength, out=there)
        return basis


@dataclass(frozen=True, slots=True)
class DCASGD(Strategy):
    """Delay-compensated asynchronous SGD; see the module.

    Args:
        adaptive: λ follows the size of the gradients, element by element (DC-ASGD-a); else it is constant
            (DC-ASGD-c).
        strength: λ₀ or λ, at least 0; 0 compensates nothing. None is 2 where adaptive, else 0.04.
        decay: d of the mean square, in [0, 1); where adaptive.
        eps: ε beside it, > 0; where adaptive.
        overlap: fetch while computing, at the price of one more step of delay.

    Example:
        >>> strategy = gs.DCASGD(strength=0.1, adaptive=False)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["staleness_max"]
        1
    """

    adaptive: bool = True
    strength: float | None = None
    decay: float = DECAY
    eps: float = EPS
    overlap: bool = False

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True
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
        """SGD, as the paper has it."""
        return SGD(lr=0.01)

    async def train(self, worker: Worker) -> None:
        """The client: that of asynchronous SGD."""
        asked = worker.server.fetch_soon() if self.overlap else None
        async for batch in worker.batches():
            if asked is None:
                await worker.pull()
            else:
                await worker.swap_in(asked)
                asked = worker.server.fetch_soon()
            await worker.accumulate(await worker.gradient(batch))
            await worker.server.push_soon(worker.take_accumulated())

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """Every push is an update of its own, as it comes."""
        return EveryPush()

    def correction(self) -> Correction | None:
        """See `Compensation` and `AdaptiveCompensation`."""
        default = 2.0 if self.adaptive else 0.04
        strength = default if self.strength is None else self.strength
        if strength == 0:
            return None
        if self.adaptive:
            return AdaptiveCompensation(strength, self.decay, self.eps)
        return Compensation(strength)
