"""Stale synchronous parallel: no worker is more than s clocks ahead of the slowest, and none waits before that.

    client, at its clock c:                                  server, on each push:
      if the copy lacks an update of a clock ≤ c - s - 1:      w ← Opt(w, g)
          w ← fetch()            (waits for the slowest)
      g ← ∇ℓ(w; batch)
      w ← w - α·g                (it sees its own updates)
      push(g);  c ← c + 1

A worker's clock counts its updates. At clock c the worker sees every worker's updates up to clock c - s - 1, perhaps
newer ones, and always its own. So the fastest worker is at most s clocks ahead of the slowest. A copy that has every
update of clocks below k serves until clock k + s, so a fetch is due every s to s + 1 steps.

s = 0 is bulk synchronous: the shard sums up the gradients of a clock and makes one update of them, so that no worker
sees a part of it. The sum is W times the mean that `synchronous` takes of the same minibatches. So under SGD, with
or without momentum, s = 0 at a rate η is `synchronous` at W·η. Adagrad, Adam and AdamW divide by the size of the
gradients: with them s = 0 is `synchronous` at η (with ε/W for ε, and a W²-th of Adagrad's initial sums).

A worker that is always slower than the others sets the pace of all once they are s clocks ahead: so the method is
defined. Minibatches that fit the workers' speeds avoid that (`shares="measured"`): all clocks then take equally long.

Bytes a step and worker: 4N up, 4N/(s+1) to 4N/s down (float32), where workers are alike. No worker waits for one
that is lost or has no minibatches. A worker that gets minibatches again takes part again, at the clock of the
slowest if its own is behind that. Every push is an update at the full rate, as in Downpour: under SGD, give each of
W workers a W-th of the rate of `synchronous`. Each gradient has its own weight decay, at the parameters that it was
computed on, and so has each local step.

Reference: Ho, Cipar, Cui, Lee, Kim, Gibbons, Gibson, Ganger, Xing, "More effective distributed ML via a
stale synchronous parallel parameter server", NIPS 2013. Different here: clocks are kept chunk by chunk, so that a
chunk with all updates of a clock need not wait for the others; updates are pushed at every clock, not gathered in a
cache; and the rate is the update rule's. The paper's η_t = σ/√t counts the updates of all P workers in t: a
worker at its step c is at about t = P·(c + 1), so its rate is `InverseRoot(σ/√P)`, (σ/√P)/√(c + 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError
from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, EveryPush
from gradstream.strategies.api import ServerWorker
from gradstream.strategies.base import ServerStrategy, check_count, check_not_negative


@dataclass(frozen=True, slots=True)
class Clocked(EveryPush):
    """The server of s > 0: each push is one update, in the order of arrival."""

    clocked: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Lockstep(Clocked):
    """The server of s = 0: the sum of one clock's pushes is one update."""

    lockstep: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class SSP(ServerStrategy):
    """Stale synchronous parallel; see the module.

    Args:
        bound: s, in clocks, which are steps; 0 is bulk synchronous.
        local_lr: α, rate at which a worker applies its own updates between two fetches, at least 0; None is the
            optimizer's rate, which is exact where the update rule is SGD. Leave it out where s = 0: there is no
            step between two fetches.

    Example:
        >>> strategy = gs.SSP(bound=2)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["staleness_max"] <= 5
        True
    """

    bound: int = 3
    local_lr: float | None = None

    partitioning: ClassVar[Partitioning] = "partitions"
    survives_worker_loss: ClassVar[bool] = True
    plain: ClassVar[Mapping[str, object] | None] = {"bound": 0, "local_lr": None}

    def __post_init__(self) -> None:
        check_count("SSP", "bound", self.bound, "clocks", least=0)
        if self.local_lr is None:
            return
        check_not_negative("SSP", "local_lr", self.local_lr, "rate")
        if self.bound == 0:
            raise ConfigError(
                f"SSP(bound=0, local_lr={self.local_lr}): workers fetch at every step, which overwrites their "
                "local steps; take a larger bound, or leave local_lr out"
            )

    @property
    def decays_gradients(self) -> bool:
        """True: the shards sum up a clock's updates where s = 0, and else a worker makes local steps."""
        return True

    def optimizer(self) -> Optimizer:
        """SGD: a worker's local steps are then the server's."""
        return SGD(lr=0.01)

    async def train(self, worker: ServerWorker) -> None:
        """The client."""
        async for batch in worker.batches(before=partial(self._read, worker)):
            gradient = await worker.gradient(batch)
            await worker.local_step(gradient, self.local_lr)
            await worker.server.push_soon(worker.take_accumulated(), advance_clock=True)

    async def _read(self, worker: ServerWorker) -> None:
        """Fetches where the worker's copy is too old for its clock; the fetch waits for the slowest worker."""
        needed = max(0, worker.server.clock - self.bound)
        if worker.version < 0 or worker.clock < needed:
            await worker.pull(min_clock=needed)

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """Each push is one update, in the order of arrival; with s = 0 all pushes of a clock are one."""
        return Clocked() if self.bound else Lockstep()
