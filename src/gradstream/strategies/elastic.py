"""Elastic averaging: each worker explores on its own, held to a common centre by a spring.

    client, after each τ local steps:                server:
      x ← x_i;  y ← fetch()                            x̃ ← x̃ + d    on each push
      d ← α·(x_i - y);  x_i ← x_i - d;  push(d)
      x_i ← Opt(x_i, ∇ℓ(x; batch))                   (the local step, which every step has)

x_i, the worker's own parameters, are kept, not overwritten; x̃, the server's, are the centre, which is
evaluated, kept in checkpoints and saved. d is computed once: what x_i loses is what x̃ gains, so an exchange
leaves Σ x_i + x̃ as it was. The gradient of the step in which one falls is of x_i as it was before, as in the
paper: so y arrives while it is computed, and d leaves while the next ones are.

`synchronous=True`: all d of an exchange are of one version of x̃, and are added together, which makes it
x̃ ← (1 - β)·x̃ + β·mean(x_i), β = W·α. A worker waits for the others from one exchange to the next, with its
own τ steps between.

Momentum is the local rule's, `optimizer=gs.optim.SGD(lr, momentum=0.9)`; with Nesterov's, δ = 0.99, this is EAMSGD.

Bytes a step and worker: 4N/τ up, 4N/τ down (float32). A dead worker stops nobody, and takes with it what of
its x_i the centre had not got; the samples behind its pushes count as gone through. For a checkpoint, and at
the end, each worker makes one more exchange. x_i itself is not kept: a resumed run begins with x_i = x̃.

Reference: Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", NIPS 2015, equations 5 and
6, Algorithms 1 and 2. Different here, with Nesterov's momentum: the spring pulls at x_i + δ·v_i, where the
gradient is taken, d ← α·(x_i + δ·v_i - x̃); Algorithm 2 prints α·(x_i - x̃). The update rules here are in
torch's form, whose parameters *are* x + δ·v (see `optim.SGD`): a worker exchanges its parameters, as in every
other strategy, and α = 1 leaves torch's result in the centre. The two pulls differ by α·δ·v_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError
from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, EveryPush
from gradstream.strategies.api import Worker
from gradstream.strategies.base import Pushes, Strategy
from gradstream.strategies.checks import check_count
from gradstream.strategies.together import Barrier

__all__ = ["EAMSGD", "ElasticAveraging"]

BETA = 0.9
"""β = W·α, where α is not given: the paper's."""


@dataclass(frozen=True, slots=True)
class ElasticAveraging(Strategy):
    """Elastic averaging SGD (EASGD); see the module.

    Args:
        every: τ, local steps between two exchanges, at least 1.
        moving_rate: α, how much of the way to the centre a worker is pulled, 0 to 1; 0.9/W if None.
        synchronous: all workers exchange together; else each when it gets there. Takes an α of at most 1/W.

    Example:
        >>> strategy = gs.ElasticAveraging(every=4)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["updates"]
        (16, 5)
    """

    every: int = 10
    moving_rate: float | None = None
    synchronous: bool = False

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True
    pushes: ClassVar[Pushes] = "differences"
    # Alone until the end, and then all of the way: the centre is where the worker has got to.
    plain: ClassVar[Mapping[str, object] | None] = {"every": 1 << 30, "moving_rate": 1.0}

    def __post_init__(self) -> None:
        check_count(type(self).__name__, "every", self.every, "steps")
        if self.moving_rate is not None and not 0.0 <= self.moving_rate <= 1.0:
            raise ConfigError(
                f"{type(self).__name__}(moving_rate={self.moving_rate}): expected 0 (workers on their own) "
                "to 1 (all of the way to the centre)"
            )

    def optimizer(self) -> Optimizer:
        """Of the workers: plain SGD."""
        return SGD(lr=0.01)

    def partitioning_of_run(self) -> Partitioning:
        """Where all exchange together, none can do more than the others."""
        return "partitions" if self.synchronous else "queue"

    async def train(self, worker: Worker) -> None:
        """The client, Algorithm 1."""
        server, away = worker.server, False
        share = BETA / worker.num_workers if self.moving_rate is None else self.moving_rate

        async def flush() -> None:
            nonlocal away
            if worker.unpushed:
                await server.push_soon(await worker.pull_towards(server.fetch_soon(), share))
            await server.flush()
            if self.synchronous and not away:
                await server.pause()
                away = True

        await worker.pull()
        async for batch in worker.batches(flush):
            if away:
                await server.resume()
                away = False
            centre = server.fetch_soon() if worker.unpushed >= self.every else None
            gradient = await worker.gradient(batch)
            if centre is not None:
                await server.push_soon(await worker.pull_towards(centre, share))
            await worker.optimize(gradient)

    def quorum(self, num_workers: int) -> None:
        """Left to the rule. Says before anything is started if all together would pass their own mean, β > 1.

        Raises:
            ConfigError: α is above 1/W, where all exchange together.
        """
        if self.synchronous and self.moving_rate is not None and self.moving_rate > 1 / num_workers:
            raise ConfigError(
                f"{type(self).__name__}(moving_rate={self.moving_rate}, synchronous=True) with {num_workers} "
                f"workers: expected at most {1 / num_workers:.4g}, with which the centre goes all of the way "
                "to their mean; with more it overshoots"
            )

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """Differences are added, each as it comes or those of all workers together."""
        return Barrier(frozenset(range(num_workers))) if self.synchronous else EveryPush()


@dataclass(frozen=True, slots=True)
class EAMSGD(ElasticAveraging):
    """Elastic averaging with Nesterov's momentum of 0.99 on the workers, Algorithm 2; see the module.

    Example:
        >>> strategy = gs.EAMSGD(every=2)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["updates"]
        (16, 9)
    """

    def optimizer(self) -> Optimizer:
        """Of the workers: δ = 0.99, and a rate that suits: steps add up to a hundred times it."""
        return SGD(lr=0.001, momentum=0.99, nesterov=True)
