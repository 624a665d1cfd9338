"""n-softsync: the server updates once it has got ⌊λ/n⌋ gradients, of whichever learners.

    client:                              server, at version i, c = ⌊λ/n⌋, on a gradient of version j:
      w ← fetch()                          τ = i - j,  sum ← sum + 1/c · 1 / max(τ, 1)^p · g,    p = 1
      push(∇ℓ(w; batch))                   after c of them:  w ← w - α · sum,  sum ← 0,  i ← i + 1

Between synchronous SGD and asynchronous: n = 1 makes an update of as many gradients as there are learners, λ,
but waits for none in particular; n = λ makes one of each gradient. Learners never wait: a gradient that is in
the sum is done with, and a fetch gets what is newest. With learners of equal speed the mean staleness is
n·(1 - 1/λ), and hardly ever is any above 2n.

With p = 0, a fixed rate, large n do not learn in the paper. The factor goes to the gradient, before the
update rule sees it: with momentum the velocity is not scaled.

Bytes a step and worker: 4N up, 4N down (float32). A dead worker stops nobody; updates still take c gradients.
What is in the sum when the run ends, or a checkpoint is made, is applied as it is.

Reference: Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016
(arXiv 1511.05950), eq. 5 and §3.2. Different here: p is an option, and τ is counted chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradstream.data.base import Partitioning
from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, EveryN, PushHeader
from gradstream.strategies.api import Worker
from gradstream.strategies.base import Strategy
from gradstream.strategies.checks import check_count
from gradstream.strategies.penalty import Penalty, check_penalty, factor

__all__ = ["Softsync", "WeightedMean"]


@dataclass(frozen=True, slots=True)
class WeightedMean(EveryN):
    """The server: `count` gradients make an update, each weighed by its staleness."""

    weight: Penalty
    power: float

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """1/c · 1 / max(τ, 1)^p, or what else was asked for."""
        return [factor(self.weight, self.power, version - one.base_version) / self.count for one in update]


@dataclass(frozen=True, slots=True)
class Softsync(Strategy):
    """n-softsync; see the module.

    Args:
        splits: n, at least 1; of as many as there are workers, or more, every gradient is an update.
        power: p, at least 0; 0 weighs all gradients alike. A function has none.
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

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True
    plain: ClassVar[Mapping[str, object] | None] = {"weight": "power"}

    def __post_init__(self) -> None:
        check_count("Softsync", "splits", self.splits, "splits")
        check_penalty("Softsync", self.weight, self.power)

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
        """See `WeightedMean`: c = ⌊λ/n⌋."""
        return WeightedMean(max(1, num_workers // self.splits), self.weight, self.power)
