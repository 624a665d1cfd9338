"""DiLoCo: workers train alone, and an outer optimizer takes the distance that they have come as a gradient.

    client i, each round:                              server, once every worker that takes part has pushed:
      w_i ← w_start ← fetch()                            Δ ← mean_i Δ_i
      H times:  w_i ← InnerOpt(w_i, ∇ℓ(w_i; batch))      v ← μ·v + Δ
      Δ_i ← w_start - w_i;  push(Δ_i)                    w ← w - ν·(Δ + μ·v)

The inner optimizer is the run's, any rule. Its state (Adam's moments, say) stays with each worker over all rounds,
and is in no checkpoint. The outer optimizer is SGD with Nesterov's momentum on the shards,
`torch.optim.SGD(lr=ν, momentum=μ, nesterov=True)`. Checkpoints have its v, and a resumed run continues with it.

With ν = 1 and μ = 0 it is parameter averaging, w ← mean_i w_i, and with one worker the inner optimizer alone, to
the rounding of w - (w - w_i). With `nesterov=False` the last line is w ← w - ν·v. That is SlowMo, with v = γ·u,
where the inner rate γ is constant. (SlowMo divides Δ by the rate of its round. Under a schedule it is another
method: v here is not rescaled when the rate changes.)

Bytes a step and worker: 4N/H up, 4N/H down (float32). All workers wait for the slowest once in H steps. A lost
worker is skipped from then on, and Δ is the mean over the others. No Δ_i is stale: all are differences from the
same w_start. For a checkpoint, and at the end, workers end their round early: the steps that they have made by then
are one more outer step.

References: Douillard and others, "DiLoCo: distributed low-communication training of language models", 2023,
Algorithm 1 (H = 500, AdamW inside, ν = 0.7, μ = 0.9); Wang, Tantia, Ballas, Rabbat, "SlowMo: improving
communication-efficient distributed SGD with slow momentum", ICLR 2020, Algorithm 1. Different here: workers may have
made different numbers of steps, where minibatches run out or a round ends early; each worker counts alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gradstream.data.base import Partitioning
from gradstream.model.base import Reduction
from gradstream.optim import SGD, AdamW
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule
from gradstream.strategies.api import ServerWorker
from gradstream.strategies.averaging import Averaged
from gradstream.strategies.base import Pushes, ServerStrategy, check_count, check_flag
from gradstream.strategies.matching import outer_sgd
from gradstream.strategies.together import train_together


@dataclass(frozen=True, slots=True)
class DiLoCo(ServerStrategy):
    """Local training with an outer optimizer, Nesterov's momentum; see the module.

    Args:
        every: H, inner steps between two outer ones, at least 1.
        outer_lr: ν, learning rate of the outer steps, > 0.
        outer_momentum: μ, share of the outer velocity that each step keeps, in [0, 1).
        nesterov: True is Nesterov's outer momentum, False the plain one, as in SlowMo; without effect at μ = 0.

    Example:
        >>> strategy = gs.DiLoCo(every=4)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["pushes"]
        (16, 5)
    """

    every: int = 10
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    partitioning: ClassVar[Partitioning] = "partitions"
    survives_worker_loss: ClassVar[bool] = True
    pushes: ClassVar[Pushes] = "outer_gradients"
    plain: ClassVar[Mapping[str, object] | None] = {"outer_lr": 1.0, "outer_momentum": 0.0}

    def __post_init__(self) -> None:
        check_count("DiLoCo", "every", self.every, "steps")
        check_flag("DiLoCo", "nesterov", self.nesterov)
        self._outer()  # raises

    def optimizer(self) -> Optimizer:
        """AdamW on the workers, as in the paper."""
        return AdamW(lr=4e-4, weight_decay=0.1)

    def outer_optimizer(self, inner: Optimizer) -> Optimizer:
        """SGD with Nesterov's momentum, on the shards."""
        del inner
        return self._outer()

    def _outer(self) -> SGD:
        return outer_sgd("DiLoCo", self.outer_lr, self.outer_momentum, nesterov=self.nesterov)

    async def train(self, worker: ServerWorker) -> None:
        """The client, Algorithm 1."""
        server = worker.server

        async def push() -> None:
            await server.push_soon(await worker.take_outer_gradient())

        async def fetch() -> None:
            await worker.start_from(server.fetch_soon())

        await train_together(worker, self.every, push, fetch)

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """The mean of the pushes of all workers that take part."""
        return Averaged(frozenset(range(num_workers)))
