"""AsySG-con: plain asynchronous SGD, an update of the sum of M gradients, each of a whole older version.

    client:                                 server:
      x ← fetch()                             x_{k+1} = x_k - γ · Σ_{m=1..M} G(x_{k-τ_{k,m}}, ξ_{k,m})
      push(∇ℓ(x; batch))

Consistent: every gradient is of one version of the parameters. Here that is so within each chunk; two chunks
may show different numbers of updates at one instant, as the paper's analysis for shared memory allows
(AsySG-incon). Nobody waits for anybody; M gradients make an update, of whichever workers.

For smooth functions, gradients without bias and of variance σ², and delays of at most T, the mean of E|∇f|²
over K updates falls as 1/√(M·K), the rate of SGD with batches of M, once K is large against T²: with

    γ = √((f(x_1) - f*) / (M·K·L·σ²)),     mean of E|∇f(x_k)|² ≤ 4·σ·√((f(x_1) - f*)·L / (M·K))

G is the gradient of the loss with its weight decay: each of the M brings λ·x of the version that it is of.
Under a schedule each goes at its own rate: γ is that of the first of the M, and each weighs its own over γ.

So the rate goes with 1/√K: tune it again for a longer run.

Bytes a step and worker: 4N up, 4N down (float32). A dead worker stops nobody. What is in the sum when the run
ends, or a checkpoint is made, is applied as it is.

Reference: Lian, Huang, Li, Liu, "Asynchronous Parallel Stochastic Gradient for Nonconvex Optimization",
NIPS 2015 (arXiv 1506.08272). Different here: a gradient is the mean over a minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gradstream.data.base import Partitioning
from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, EveryN
from gradstream.strategies.api import Worker
from gradstream.strategies.base import Strategy
from gradstream.strategies.checks import check_count

__all__ = ["AsySG"]


@dataclass(frozen=True, slots=True)
class AsySG(Strategy):
    """Plain asynchronous SGD; see the module.

    Args:
        gradients: M, at least 1: so many are summed in an update.

    Example:
        >>> strategy = gs.AsySG(gradients=2)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["staleness_max"]
        1
    """

    gradients: int = 1

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True
    plain: ClassVar[Mapping[str, object] | None] = {"gradients": 1}

    def __post_init__(self) -> None:
        check_count("AsySG", "gradients", self.gradients, "gradients")

    @property
    def decays_gradients(self) -> bool:
        """Where an update is a sum."""
        return self.gradients > 1

    def optimizer(self) -> Optimizer:
        """SGD without momentum, as the paper has it."""
        return SGD(lr=0.01)

    async def train(self, worker: Worker) -> None:
        """The client: each gradient is computed on the newest parameters, and pushed."""
        async for batch in worker.batches():
            await worker.pull()
            await worker.accumulate(await worker.gradient(batch))
            await worker.server.push_soon(worker.take_accumulated())

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """The sum of M."""
        return EveryN(self.gradients)
