"""Asynchronous DiLoCo: workers train alone, each at its own pace, and no outer step waits for another worker.

    client i:                                          server, on each push, of W workers:
      w_start ← w_i ← fetch()                            p ← p + Δ_i / W
      repeat:                                            w ← w - ν·Δ_i / W
        H times:  w_i ← InnerOpt(w_i, ∇ℓ(w_i; batch))    after each N-th:  v ← μ·v + p;  w ← w - ν·μ·v;  p ← 0
        push(Δ_i ← w_start - w_i);  y ← fetch()
        τ minibatches later:  w_i ← y + what w_i has moved since the push;  w_start ← y

Δ_i was made from a w_start that the pushes of others have overtaken meanwhile. Nesterov's momentum on each such push
makes the loss swing; so the velocity moves once in N pushes (delayed Nesterov), from their sum. W pushes move w as far
as one outer step of `diloco` with their mean.

With τ = 0 a worker waits for its exchange. With τ > 0 the exchange continues while it makes the next τ minibatches: up
to τ = H nothing is waited for where the link carries a push and a fetch in the time of H minibatches.

With one worker, ν = 1 and μ = 0 it is the inner optimizer alone, to the rounding of w - (w - w_i).

Bytes a step and worker: 4N/H up, 4N/H down (float32; a codec makes the first fewer). A dead worker stops no other; its
minibatches since its last push are gone through by others. A newcomer begins with the newest parameters.

References: Liu, Chhaparia, Douillard and others, "Asynchronous local-SGD training for language modeling", 2024
(arXiv 2401.09135), Algorithms 2 and 3 with c = 0, N as an option; Douillard and others, "Streaming DiLoCo with
overlapping communication", 2025, for τ. Different here: the paper gives slow workers fewer inner steps, and here they
push less often; the result of an exchange is taken whole (α = 0), with the worker's own way since on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError
from gradstream.model.base import Reduction
from gradstream.optim import AdamW
from gradstream.optim.base import Optimizer
from gradstream.optim.delayed_nesterov import DelayedNesterov
from gradstream.server.aggregation import AggregationRule, EveryPush, PushHeader
from gradstream.server.client.fetch import Arrival
from gradstream.strategies.api import ServerWorker
from gradstream.strategies.base import Pushes, ServerStrategy, check_count
from gradstream.strategies.matching import check_outer


@dataclass(frozen=True, slots=True)
class EqualShares(EveryPush):
    """Makes every push an update, of 1/W of what it has.

    Args:
        workers: W.
    """

    workers: int

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """1/W for each push."""
        return (1 / self.workers,)


@dataclass(frozen=True, slots=True)
class AsyncDiLoCo(ServerStrategy):
    """Local training with an outer optimizer that waits for nobody; see the module.

    Args:
        every: H, inner steps between two pushes of a worker, at least 1.
        outer_lr: ν, learning rate of the outer steps, > 0.
        outer_momentum: μ, share of the outer velocity that each of its moves keeps, in [0, 1).
        momentum_every: N, pushes between two moves of the velocity, at least 1: about the number of workers.
        delay: τ, minibatches that a worker makes while its exchange is in progress, 0 to `every`.

    Example:
        >>> strategy = gs.strategies.AsyncDiLoCo(every=4)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["updates"]
        (16, 5)
    """

    every: int = 10
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    momentum_every: int = 4
    delay: int = 0

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True
    pushes: ClassVar[Pushes] = "outer_gradients"
    plain: ClassVar[Mapping[str, object] | None] = {"outer_lr": 1.0, "outer_momentum": 0.0, "delay": 0}

    def __post_init__(self) -> None:
        check_count("AsyncDiLoCo", "every", self.every, "steps")
        check_count("AsyncDiLoCo", "momentum_every", self.momentum_every, "pushes")
        if not 0 <= self.delay <= self.every:
            raise ConfigError(
                f"AsyncDiLoCo(every={self.every}, delay={self.delay}): expected a delay of 0 to {self.every} "
                "minibatches, since the next push begins where the last exchange has ended"
            )
        self._outer()  # raises

    def optimizer(self) -> Optimizer:
        """AdamW on the workers, as in the paper."""
        return AdamW(lr=4e-4, weight_decay=0.1)

    def outer_optimizer(self, inner: Optimizer) -> Optimizer:
        """Delayed Nesterov, on the shards."""
        del inner
        return self._outer()

    def _outer(self) -> DelayedNesterov:
        make = lambda: DelayedNesterov(self.outer_lr, self.outer_momentum, self.momentum_every)  # noqa: E731
        return check_outer("AsyncDiLoCo", self.outer_lr, self.outer_momentum, make)

    async def train(self, worker: ServerWorker) -> None:
        """The client."""
        server = worker.server
        pending: Arrival | None = None
        fresh = True  # w_i begins with what is fetched next

        async def take_in() -> None:
            nonlocal pending
            if pending is not None:
                await worker.rebase_on(pending)
                pending = None

        async def flush() -> None:
            nonlocal fresh
            await take_in()
            if worker.unpushed:
                await server.push_soon(await worker.take_outer_gradient())
                fresh = True
            await server.flush()

        async for batch in worker.batches(flush):
            if fresh:
                await worker.start_from(server.fetch_soon())
                fresh = False
            elif worker.unpushed >= self.delay:
                await take_in()
            await worker.optimize(await worker.gradient(batch))
            if worker.unpushed >= self.every:
                await take_in()
                await server.push_soon(await worker.take_outer_gradient(goes_on=self.delay > 0))
                if self.delay:
                    pending = server.fetch_soon()
                fresh = not self.delay

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """Each push is one update, by 1/W of it."""
        return EqualShares(num_workers)
