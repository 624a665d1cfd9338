"""Staleness-aware SGD: asynchronous SGD whose rate for a gradient falls with the updates that have overtaken it.

    client:                                 server, at version i, on a gradient computed on version j:
      w ← fetch()                             τ = i - j
      push(∇ℓ(w; batch))                      w ← w - α / max(τ, 1)^p · g,     p = 1

A rate α is stable for a gradient of staleness τ up to about π / (2·a·τ), a the curvature. With α/τ one α is right
for every τ, so a rate that was tuned on one machine holds for many. No worker waits for another.

The factor is applied to the gradient before the update rule sees it: with momentum, the velocity is not scaled. A
weight below 1 is not made up for later: with W equal workers, whose gradients all have τ ≈ W - 1, the sum of W of
them moves w as far as their mean does in one synchronous round.

With `max_delay=R` the server drops gradients of τ ≥ R, which change neither w nor i. With p = 0 that is Ringmaster,
whose time has the optimal order for workers of any speeds, where R fits the variance of the gradients. The samples of a
dropped gradient count as gone through; `summary["dropped"]` says how many gradients were dropped, counted by chunk.

Bytes a step and worker: 4N up, 4N down (float32). A dead worker stops no other.

Reference: Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016
(arXiv 1511.05950), §3.2, with n = λ; for smaller n see `softsync.py`. Different here: p, and any other function
of τ, are options; τ is counted chunk by chunk. Maranjyan, Tyurin, Richtárik, "Ringmaster ASGD: The first asynchronous
SGD with optimal time complexity", 2025 (arXiv 2501.16168), for `max_delay`. Different here: a gradient that is going to
be too late is computed to its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, PushHeader
from gradstream.strategies.base import check_count
from gradstream.strategies.softsync import Penalty, WeightedMean, check_penalty
from gradstream.strategies.together import StaleGradients


@dataclass(frozen=True, slots=True)
class NewEnough(WeightedMean):
    """Makes each push an update, weighed by its staleness, unless that is too large.

    Args:
        max_delay: R; None drops nothing.
    """

    max_delay: int | None = None

    def drops(self, version: int, new: PushHeader) -> bool:
        """Whether R updates or more have come since the parameters on which the gradient was computed."""
        return self.max_delay is not None and version - new.base_version >= self.max_delay


@dataclass(frozen=True, slots=True)
class StalenessAware(StaleGradients):
    """Asynchronous SGD with a rate of α/τ; see the module.

    Args:
        power: p, at least 0; 0 weighs all gradients alike. Leave it out beside a function.
        weight: "power", "exponential", or a function of τ; see `strategies.softsync`.
        max_delay: R, at least 1: gradients that are this many updates old are dropped; None drops none.

    Example:
        >>> strategy = gs.strategies.StalenessAware(power=1.0)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["staleness_max"]
        1
    """

    power: float = 1.0
    weight: Penalty = "power"
    max_delay: int | None = None

    plain: ClassVar[Mapping[str, object] | None] = {"weight": "power"}

    def __post_init__(self) -> None:
        check_penalty("StalenessAware", self.weight, self.power)
        if self.max_delay is not None:
            check_count("StalenessAware", "max_delay", self.max_delay, "updates", other=", or None for any")

    def optimizer(self) -> Optimizer:
        """SGD with momentum, at the paper's rate."""
        return SGD(lr=0.001, momentum=0.9)

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """Each push is one update: n-softsync with n = λ, so c = 1."""
        return NewEnough(1, self.weight, self.power, self.max_delay)
