"""Elastic averaging: each worker explores on its own, and a spring holds it near a common centre.

    client, after each τ local steps:                server:
      x ← x_i;  y ← fetch()                            x̃ ← x̃ + d    on each push
      d ← α·(x_i - y);  x_i ← x_i - d;  push(d)
      x_i ← Opt(x_i, ∇ℓ(x; batch))                   (the local step, which every step has)

A worker keeps its own parameters x_i; a fetch does not overwrite them. The server's parameters x̃ are the centre,
which is evaluated, checkpointed and saved. d is computed once: x̃ gains exactly the loss of x_i, so an exchange
leaves Σ x_i + x̃ unchanged. In a step with an exchange the gradient is taken at x_i before the exchange, as in the
paper. So y arrives while that gradient is computed, and d is sent while the next ones are.

`synchronous=True`: all d of an exchange are computed from one version of x̃ and added together, which makes it
x̃ ← (1 - β)·x̃ + β·mean(x_i), β = W·α. A worker then waits for the others from one exchange to the next; its τ
steps lie between.

Momentum is an option of the local rule: `optimizer=gs.optim.SGD(lr, momentum=0.9)`. With Nesterov's momentum δ = 0.99
this is EAMSGD.

Bytes a step and worker: 4N/τ up, 4N/τ down (float32). A dead worker stops no other. The part of its x_i that it had
not pushed to the centre is lost; the samples behind its pushes count as done. For a checkpoint, and at the end, each
worker makes one more exchange. No checkpoint has the x_i: a resumed run begins with x_i = x̃.

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
from gradstream.strategies.api import ServerWorker
from gradstream.strategies.base import Pushes, ServerStrategy, check_count
from gradstream.strategies.together import Barrier

BETA = 0.9
"""β = W·α of the default α, as in the paper."""


@dataclass(frozen=True, slots=True)
class ElasticAveraging(ServerStrategy):
    """Elastic averaging SGD (EASGD); see the module.

    Args:
        every: τ, local steps between two exchanges, at least 1.
        moving_rate: α, share of its distance to the centre by which a worker is pulled, 0 to 1; None is 0.9/W.
        synchronous: True lets all workers exchange together, for an α of at most 1/W; with False each worker
            exchanges at its own pace.

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
    # One exchange at the end, over the whole distance: the centre is then at the worker's parameters.
    plain: ClassVar[Mapping[str, object] | None] = {"every": 1 << 30, "moving_rate": 1.0}

    def __post_init__(self) -> None:
        check_count(type(self).__name__, "every", self.every, "steps")
        if self.moving_rate is not None and not 0.0 <= self.moving_rate <= 1.0:
            raise ConfigError(
                f"{type(self).__name__}(moving_rate={self.moving_rate}): expected 0 to 1, the fraction of the distance "
                "to the centre that a worker moves at each exchange: 0 not at all, 1 onto the centre"
            )

    def optimizer(self) -> Optimizer:
        """Plain SGD, on the workers."""
        return SGD(lr=0.01)

    def partitioning_of_run(self) -> Partitioning:
        """Partitions where all exchange together, since then no worker can do more than the others."""
        return "partitions" if self.synchronous else "queue"

    async def train(self, worker: ServerWorker) -> None:
        """The client, Algorithm 1."""
        server = worker.server
        share = BETA / worker.num_workers if self.moving_rate is None else self.moving_rate

        async def flush() -> None:
            if worker.unpushed:
                await server.push_soon(await worker.pull_towards(server.fetch_soon(), share))
            await server.flush()

        await worker.pull()
        async for batch in worker.batches(flush, waited_for=self.synchronous):
            centre = server.fetch_soon() if worker.unpushed >= self.every else None
            gradient = await worker.gradient(batch)
            if centre is not None:
                await server.push_soon(await worker.pull_towards(centre, share))
            await worker.optimize(gradient)

    def quorum(self, num_workers: int) -> None:
        """Returns None: the rule decides. Checks α here, where the number of workers is known first.

        Raises:
            ConfigError: α is above 1/W where all exchange together, so that the centre overshoots (β > 1).
        """
        if self.synchronous and self.moving_rate is not None and self.moving_rate > 1 / num_workers:
            raise ConfigError(
                f"{type(self).__name__}(moving_rate={self.moving_rate}, synchronous=True) with {num_workers} "
                f"workers: expected at most {1 / num_workers:.4g}, which moves the centre to the mean of the "
                "workers; a larger rate moves it beyond the mean"
            )

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """With `synchronous` adds the differences of all workers together, otherwise each as it arrives."""
        return Barrier(frozenset(range(num_workers))) if self.synchronous else EveryPush()


@dataclass(frozen=True, slots=True)
class EAMSGD(ElasticAveraging):
    """Elastic averaging with Nesterov's momentum of 0.99 on the workers, Algorithm 2; see the module.

    Example:
        >>> strategy = gs.strategies.EAMSGD(every=2)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["updates"]
        (16, 9)
    """

    def optimizer(self) -> Optimizer:
        """SGD with δ = 0.99 on the workers. Its rate is small, since momentum multiplies a steady step by 100."""
        return SGD(lr=0.001, momentum=0.99, nesterov=True)
