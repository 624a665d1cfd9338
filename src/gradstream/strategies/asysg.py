"""AsySG-con: plain asynchronous SGD, with one update for the sum of M gradients of older versions.

    client:                                 server:
      x ← fetch()                             x_{k+1} = x_k - γ · Σ_{m=1..M} G(x_{k-τ_{k,m}}, ξ_{k,m})
      push(∇ℓ(x; batch))

Consistent means that each gradient is computed on one version of the parameters. Here that holds within each
chunk: two chunks may show different numbers of updates at one instant, as the paper's analysis for shared memory
allows (AsySG-incon). No worker waits for another; any M gradients make an update, whichever workers they are of.

For a smooth function f, gradients without bias and of variance σ², and delays of at most T, the mean of E|∇f|²
over K updates falls as 1/√(M·K), the rate of SGD with batches of M, once K is large against T²: with

    γ = √((f(x_1) - f*) / (M·K·L·σ²)),     mean of E|∇f(x_k)|² ≤ 4·σ·√((f(x_1) - f*)·L / (M·K))

So the best γ is proportional to 1/√K: tune it again for a longer run.

G is the gradient of the loss with weight decay: each of the M gradients adds λ·x of the version that it was
computed on. Under a schedule each gradient has its own rate: γ is the rate of the first of the M, and each is
weighed by its own rate over γ.

Bytes a step and worker: 4N up, 4N down (float32). A dead worker stops no other. At the end of a run, and for a
checkpoint, the server applies an incomplete sum as it is.

Reference: Lian, Huang, Li, Liu, "Asynchronous Parallel Stochastic Gradient for Nonconvex Optimization",
NIPS 2015 (arXiv 1506.08272). Different here: a gradient is the mean over a minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, EveryN
from gradstream.strategies.base import check_count
from gradstream.strategies.together import StaleGradients


@dataclass(frozen=True, slots=True)
class AsySG(StaleGradients):
    """Plain asynchronous SGD; see the module.

    Args:
        gradients: M, the number of gradients in an update, at least 1.

    Example:
        >>> strategy = gs.strategies.AsySG(gradients=2)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["staleness_max"]
        1
    """

    gradients: int = 1

    plain: ClassVar[Mapping[str, object] | None] = {"gradients": 1}

    def __post_init__(self) -> None:
        check_count("AsySG", "gradients", self.gradients, "gradients")

    @property
    def decays_gradients(self) -> bool:
        """Whether an update is a sum: each of its gradients then has its own decay."""
        return self.gradients > 1

    def optimizer(self) -> Optimizer:
        """SGD without momentum, as in the paper."""
        return SGD(lr=0.01)

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """One update for the sum of M gradients."""
        return EveryN(self.gradients)
