"""Downpour SGD: asynchronous replicas around a sharded parameter server.

    client, at step t:                                   server, on each push:
      every n_fetch steps:  w ← fetch()                    w ← w - γ·acc / √(Σ acc²)    (Adagrad)
      v ← μ·v + ∇ℓ(w; batch)
      acc ← acc + v;  w ← w - α·v
      every n_push steps:   push(acc);  acc ← 0

No replica waits for another. `overlap=False` is the literal algorithm with the fetch after the
push: a worker reads its own pushes, and one worker with n_push = n_fetch = k is k-step local SGD.
`overlap=True` lets both travel while the next minibatches are computed: the parameters adopted
were asked for one period ago, and one worker is SGD with that delay.

Bytes a step and worker: 4N/n_push up, 4N/n_fetch down (float32). A dead worker stops nobody;
samples it had not got acknowledged are taken over by the others. What one push brings is applied
chunk by chunk: two chunks may show different numbers of updates at one instant, as in the paper.

Reference: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, Algorithm 1.1 and §4.1.
Different here: a push is due after step n_push - 1, not before step 0, so that a fetch finds the
worker's own progress; Adagrad divides by √(Σ acc²) + ε, as the paper's rate is 0/0 at first. The paper
has no momentum, μ = 0. With a long period and γ = α/W for W workers, which makes the server take the
mean of their progress, it is what brings accuracy back to that of one machine (see docs/choose.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from gradstream.errors import ConfigError
from gradstream.model.base import Reduction
from gradstream.optim import Adagrad
from gradstream.optim.base import Optimizer
from gradstream.server.rule import Immediate, Rule
from gradstream.strategies.base import Strategy, Worker

__all__ = ["Downpour"]


@dataclass(frozen=True, slots=True)
class Downpour(Strategy):
    """Downpour SGD; see the module.

    Args:
        push_every: n_push, in steps.
        fetch_every: n_fetch, in steps.
        overlap: exchange while computing, at the price of one more period of delay.
        local_lr: α of the local steps between two fetches; the optimizer's rate if None.
        local_momentum: μ of the local steps, in [0, 1). Each worker keeps its v over all fetches.
    """

    push_every: int = 1
    fetch_every: int = 1
    overlap: bool = True
    local_lr: float | None = None
    local_momentum: float = 0.0

    cut: ClassVar[Literal["rounds", "partitions"]] = "partitions"
    survives_worker_loss: ClassVar[bool] = True
    plain: ClassVar[Mapping[str, object] | None] = {
        "push_every": 1,
        "fetch_every": 1,
        "overlap": False,
        "local_momentum": 0.0,
    }

    def __post_init__(self) -> None:
        for name in ("push_every", "fetch_every"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"Downpour({name}={value}): expected a number of steps of at least 1")
        if not 0.0 <= self.local_momentum < 1.0:
            raise ConfigError(f"Downpour(local_momentum={self.local_momentum}): expected 0 or more, below 1")

    def optimizer(self) -> Optimizer:
        """Adagrad, which the paper found to make asynchrony robust.

        Its sums start above zero: the first updates, which several workers compute on the same
        parameters, would otherwise each be a full step of the rate in every coordinate.
        """
        return Adagrad(lr=0.01, initial_accumulator=0.01)

    async def train(self, worker: Worker) -> None:
        """The client, Algorithm 1.1."""
        asked = worker.server.fetch_soon() if self.overlap else None
        async for batch in worker.batches():
            if worker.step % self.fetch_every == 0:
                if asked is None:
                    await worker.refresh()
                else:
                    await worker.adopt(asked)
                    asked = worker.server.fetch_soon()
            gradient = await worker.gradient(batch)
            await worker.descend(gradient, self.local_lr, momentum=self.local_momentum)
            if (worker.step + 1) % self.push_every == 0:
                await worker.server.push_soon(worker.take_accumulated())

    def rule(self, num_workers: int, reduction: Reduction) -> Rule:
        """Every push is an update of its own, as it comes."""
        return Immediate()
