"""Staleness-aware SGD: asynchronous SGD in which a gradient counts less, the more updates have overtaken it.

    client:                                 server, at version i, on a gradient computed on version j:
      w ← fetch()                             τ = i - j
      push(∇ℓ(w; batch))                      w ← w - α / max(τ, 1)^p · g,     p = 1

A rate α is stable for a gradient of staleness τ up to about π / (2·a·τ), a the curvature. With α/τ one α does
for every τ, so what was tuned on one machine holds for many. Nobody waits for anybody.

The factor goes to the gradient, before the update rule sees it: with momentum the velocity is not scaled.
What a stale gradient has lost is lost: with W equal workers, whose gradients all have τ ≈ W - 1, the sum of W
of them moves w as far as one of a synchronous round of their mean would.

Bytes a step and worker: 4N up, 4N down (float32). A dead worker stops nobody.

Reference: Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016
(arXiv 1511.05950), §3.2, with n = λ; for smaller n see `softsync.py`. Different here: p, and any other
function of τ, are options; τ is counted chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gradstream.data.base import Partitioning
from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule
from gradstream.strategies.api import Worker
from gradstream.strategies.base import Strategy
from gradstream.strategies.penalty import Penalty, check_penalty
from gradstream.strategies.softsync import WeightedMean

__all__ = ["StalenessAware"]


@dataclass(frozen=True, slots=True)
class StalenessAware(Strategy):
    """Asynchronous SGD with a rate of α/τ; see the module.

    Args:
        power: p, at least 0; 0 weighs all gradients alike. A function has none.
        weight: "power", "exponential", or a function of τ; see `strategies.penalty`.

    Example:
        >>> strategy = gs.StalenessAware(power=1.0)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["staleness_max"]
        1
    """

    power: float = 1.0
    weight: Penalty = "power"

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True
    plain: ClassVar[Mapping[str, object] | None] = {"weight": "power"}

    def __post_init__(self) -> None:
        check_penalty("StalenessAware", self.weight, self.power)

    def optimizer(self) -> Optimizer:
        """SGD with momentum, of the paper's rate."""
        return SGD(lr=0.001, momentum=0.9)

    async def train(self, worker: Worker) -> None:
        """The client: each gradient is computed on the newest parameters, and pushed."""
        async for batch in worker.batches():
            await worker.pull()
            await worker.accumulate(await worker.gradient(batch))
            await worker.server.push_soon(worker.take_accumulated())

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """Every push is an update of its own: n-softsync with n = λ, so c = 1."""
        return WeightedMean(1, self.weight, self.power)
