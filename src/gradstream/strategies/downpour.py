"""Downpour SGD: asynchronous replicas around a sharded parameter server.

    client, at step t:                                   server, on each push:
      every n_fetch steps:  w ← fetch()                    w ← w - γ·acc / √(Σ acc²)    (Adagrad)
      v ← μ·v + ∇ℓ(w; batch) + λ·w
      acc ← acc + η/γ·v;  w ← w - α·v
      every n_push steps:   push(acc);  acc ← 0

No replica waits for another. `overlap=False` is the literal algorithm, with the fetch after the push: a worker
reads its own pushes, and one worker with n_push = n_fetch = k is k-step local SGD. With `overlap=True` push and
fetch travel while the next minibatches are computed: a replica then takes the parameters that it asked for one
period ago, and one worker is SGD with that delay.

Bytes a step and worker: 4N/n_push up, 4N/n_fetch down (float32). A dead worker stops no other; the others take
over the samples that no shard had acknowledged to it. Each chunk applies its part of a push by itself: at one
instant two chunks may show different numbers of updates, as in the paper.

Each step has its own weight decay λ and, under a schedule, its own rate η. The server applies a sum at γ, the
rate of the sum's first step; each step enters the sum with the weight η/γ, which is 1 at a constant rate. So k
local steps are steps of SGD. A rule with state (momentum on the server, Adagrad, Adam) makes one update of the
sum, at γ. AdamW takes its decay off the parameters, so the decay comes once an update. α is η, or `local_lr`,
which follows the schedule; a group of parameters multiplies α and γ by its `lr_scale`.


Reference: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, Algorithm 1.1 and §4.1.
Different here: a push is due after step n_push - 1, not before step 0, so that a fetch finds the worker's own
progress; Adagrad divides by √(Σ acc²) + ε, as the paper's rate is 0/0 at first. The paper has no momentum, no
weight decay and no schedule: μ = λ = 0, η = γ. With a long period and γ = α/W for W workers, the server takes
the mean of their progress; momentum then brings the accuracy of one machine back (see
docs/strategies/downpour.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError
from gradstream.model.base import Reduction
from gradstream.optim import Adagrad
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, EveryPush
from gradstream.server.client.fetch import Arrival
from gradstream.strategies.api import ServerWorker
from gradstream.strategies.base import RowExchange, ServerStrategy, check_count, check_not_negative
from gradstream.wire.chunks import MAX_CHUNK_ELEMS


class AsynchronousStrategy(ServerStrategy):
    """The base of strategies in which no worker waits for another."""

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True

    async def fetch(self, worker: ServerWorker, pending: Arrival | None, *, overlap: bool) -> Arrival | None:
        """Gives a worker the parameters of its next gradients, and returns the fetch that is pending from now on.

        Args:
            worker: the argument of `train`.
            pending: the fetch started a period ago; None if there is none.
            overlap: start the next fetch now, so that it travels while the worker computes.
        """
        if pending is not None:
            await worker.swap_in(pending)
        if not overlap:
            await worker.pull()
            return None
        if pending is None:
            await worker.swap_in(worker.server.fetch_soon())
        return worker.server.fetch_soon()


@dataclass(frozen=True, slots=True)
class Downpour(AsynchronousStrategy):
    """Downpour SGD; see the module.

    Args:
        push_every: n_push, in steps, at least 1.
        fetch_every: n_fetch, in steps, at least 1.
        overlap: exchange while computing, at the price of one more period of delay.
        local_lr: α of the local steps between two fetches, at least 0, where fetch_every is above 1; None is
            the optimizer's rate.
        local_momentum: μ of the local steps, in [0, 1). Each worker keeps its v over all fetches.
        significance: θ, at least 0. A worker pushes the rows of acc that would change their parameters by more
            than this share of them, and keeps the others until they have grown; 0 pushes everything.
        significance_of: "relative" to the parameters' size, or "absolute".
        block_elems: elements of a row where a tensor is not row-sparse.

    Example:
        >>> strategy = gs.Downpour(push_every=2)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["pushes"]
        (16, 9)
    """

    push_every: int = 1
    fetch_every: int = 1
    overlap: bool = True
    local_lr: float | None = None
    local_momentum: float = 0.0
    significance: float = 0.0
    significance_of: Literal["relative", "absolute"] = "relative"
    block_elems: int = 16

    pipelined: ClassVar[bool] = True
    plain: ClassVar[Mapping[str, object] | None] = {
        "push_every": 1,
        "fetch_every": 1,
        "overlap": False,
        "local_lr": None,
        "local_momentum": 0.0,
        "significance": 0.0,
        "significance_of": "relative",
    }

    def __post_init__(self) -> None:
        for name in ("push_every", "fetch_every"):
            check_count("Downpour", name, getattr(self, name), "steps")
        self._check_local_steps()
        self._check_significance()

    def _check_local_steps(self) -> None:
        if not 0.0 <= self.local_momentum < 1.0:
            raise ConfigError(f"Downpour(local_momentum={self.local_momentum}): expected 0 or more, below 1")
        if self.local_lr is None:
            return
        check_not_negative("Downpour", "local_lr", self.local_lr, "rate")
        if self.fetch_every == 1:
            raise ConfigError(
                f"Downpour(local_lr={self.local_lr}, fetch_every=1): each step begins with a fetch, which "
                "overwrites the previous local step; take a longer fetch_every, or leave local_lr out"
            )

    def _check_significance(self) -> None:
        if not 0.0 <= self.significance < math.inf:
            raise ConfigError(f"Downpour(significance={self.significance}): expected 0 or more")
        if self.significance_of not in ("relative", "absolute"):
            raise ConfigError(
                f"Downpour(significance_of={self.significance_of!r}): expected 'relative' or 'absolute'"
            )
        if self.significance_of == "absolute" and not self.significance:
            raise ConfigError(
                "Downpour(significance_of='absolute', significance=0.0): with this threshold everything is "
                "significant; set significance above 0, or leave significance_of out"
            )
        if self.significance and self.local_momentum:
            raise ConfigError(
                f"Downpour(significance={self.significance}, local_momentum={self.local_momentum}): momentum "
                "moves every parameter at every step; use one of the two"
            )
        if not 1 <= self.block_elems <= MAX_CHUNK_ELEMS:
            raise ConfigError(f"Downpour(block_elems={self.block_elems}): expected 1 to {MAX_CHUNK_ELEMS}")

    @property
    def decays_gradients(self) -> bool:
        """True if a push or a fetch comes after several gradients, or a velocity joins them."""
        return self.push_every > 1 or self.fetch_every > 1 or self.local_momentum > 0

    def optimizer(self) -> Optimizer:
        """Adagrad, which makes asynchrony robust, as the paper found.

        Its sums begin above zero. Otherwise each of the first updates, which several workers compute on the same
        parameters, would be a full step of the rate in every coordinate.
        """
        return Adagrad(lr=0.01, initial_accumulator=0.01)

    async def train(self, worker: ServerWorker) -> None:
        """The client, Algorithm 1.1."""
        pending: Arrival | None = None
        async for batch in worker.batches():
            if worker.since % self.fetch_every == 0:
                pending = await self.fetch(worker, pending, overlap=self.overlap)
            gradient = await worker.gradient(batch)
            await worker.local_step(gradient, self.local_lr, momentum=self.local_momentum)
            if (worker.since + 1) % self.push_every == 0:
                await worker.server.push_soon(worker.take_accumulated())

    def rows(self, tables: bool) -> RowExchange | None:
        """Changed rows alone, where the model has row-sparse tensors or `significance` is above 0."""
        if not tables and not self.significance:
            return None
        return RowExchange(self.significance, self.significance_of == "relative", self.block_elems)

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """Each push is one update, in the order of arrival."""
        return EveryPush()
