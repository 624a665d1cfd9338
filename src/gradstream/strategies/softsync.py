"""n-softsync: the server updates once it has ⌊λ/n⌋ gradients, whichever learners they are of.

    client:                              server, at version i, c = ⌊λ/n⌋, on a gradient of version j:
      w ← fetch()                          τ = i - j,  sum ← sum + 1/c · 1 / max(τ, 1)^p · g,    p = 1
      push(∇ℓ(w; batch))                   after c of them:  w ← w - α · sum,  sum ← 0,  i ← i + 1

λ is the number of learners (workers). n = 1 is near synchronous SGD: an update has as many gradients as there are
learners, but the server waits for none in particular. n = λ is asynchronous SGD, with one update for each
gradient. Learners never wait: a gradient is done with once it is in the sum, and a fetch gets the newest
parameters. With learners of equal speed the mean staleness is n·(1 - 1/λ), and a staleness above 2n is very rare.

With p = 0, a fixed rate, large n do not learn in the paper. The factor is applied to the gradient before the update
rule sees it: with momentum, the velocity is not scaled.

Bytes a step and worker: 4N up, 4N down (float32). A dead worker stops no other; an update still takes c gradients.
At the end of a run, and for a checkpoint, the server applies an incomplete sum as it is.

Reference: Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016
(arXiv 1511.05950), eq. 5 and §3.2. Different here: p is an option, and τ is counted chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, EveryN, PushHeader
from gradstream.strategies.base import check_count
from gradstream.strategies.penalty import Penalty, check_penalty, factor
from gradstream.strategies.stale import StaleGradients


@dataclass(frozen=True, slots=True)
class WeightedMean(EveryN):
    """The server: `count` gradients make an update, each weighed by its staleness."""

    weight: Penalty
    power: float

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """1/c · 1 / max(τ, 1)^p, or 1/c times another function of τ."""
        return [factor(self.weight, self.power, version - one.base_version) / self.count for one in update]


@dataclass(frozen=True, slots=True)
class Softsync(StaleGradients):
    """n-softsync; see the module. Warm starts and waves are options of `StagedStrategy`.

    Args:
        splits: n, at least 1; with n of at least the number of workers, each gradient is an update.
        power: p, at least 0; 0 weighs all gradients alike. Leave it out beside a function.
        weight: "power", "exponential", or a function of τ; see `strategies.penalty`.

    Example:
        >>> strategy = gs.Softsync(splits=2)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["staleness_max"]
        1
    """

    splits: int = 1
    power: float = 1.0
    weight: Penalty = "power"

    plain: ClassVar[Mapping[str, object] | None] = {"weight": "power"}

    def __post_init__(self) -> None:
        StaleGradients.__post_init__(self)
        check_count("Softsync", "splits", self.splits, "splits")
        check_penalty("Softsync", self.weight, self.power)

    def optimizer(self) -> Optimizer:
        """SGD with momentum, at the paper's rate."""
        return SGD(lr=0.001, momentum=0.9)

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """See `WeightedMean`: c = ⌊λ/n⌋."""
        return WeightedMean(max(1, num_workers // self.splits), self.weight, self.power)
