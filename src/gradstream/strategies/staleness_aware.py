"""Staleness-aware SGD: asynchronous SGD whose rate for a gradient falls with the updates that have overtaken it.

    client:                                 server, at version i, on a gradient computed on version j:
      w ← fetch()                             τ = i - j
      push(∇ℓ(w; batch))                      w ← w - α / max(τ, 1)^p · g,     p = 1

A rate α is stable for a gradient of staleness τ up to about π / (2·a·τ), a the curvature. With α/τ one α is right
for every τ, so a rate that was tuned on one machine holds for many. No worker waits for another.

The factor is applied to the gradient before the update rule sees it: with momentum, the velocity is not scaled. A
weight below 1 is not made up for later: with W equal workers, whose gradients all have τ ≈ W - 1, the sum of W of
them moves w as far as their mean does in one synchronous round.

Bytes a step and worker: 4N up, 4N down (float32). A dead worker stops no other.

Reference: Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016
(arXiv 1511.05950), §3.2, with n = λ; for smaller n see `softsync.py`. Different here: p, and any other function
of τ, are options; τ is counted chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule
from gradstream.strategies.penalty import Penalty, check_penalty
from gradstream.strategies.softsync import WeightedMean
from gradstream.strategies.stale import StaleGradients


@dataclass(frozen=True, slots=True)
class StalenessAware(StaleGradients):
    """Asynchronous SGD with a rate of α/τ; see the module. Warm starts and waves are options of `StagedStrategy`.

    Args:
        power: p, at least 0; 0 weighs all gradients alike. Leave it out beside a function.
        weight: "power", "exponential", or a function of τ; see `strategies.penalty`.

    Example:
        >>> strategy = gs.strategies.StalenessAware(power=1.0)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["staleness_max"]
        1
    """

    power: float = 1.0
    weight: Penalty = "power"

    plain: ClassVar[Mapping[str, object] | None] = {"weight": "power"}

    def __post_init__(self) -> None:
        StaleGradients.__post_init__(self)
        check_penalty("StalenessAware", self.weight, self.power)

    def optimizer(self) -> Optimizer:
        """SGD with momentum, at the paper's rate."""
        return SGD(lr=0.001, momentum=0.9)

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """Each push is one update: n-softsync with n = λ, so c = 1."""
        return WeightedMean(1, self.weight, self.power)
