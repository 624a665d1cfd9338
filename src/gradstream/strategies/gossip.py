"""Gossip: each worker trains its own parameters, and averages them with one other worker at a time.

    worker i, each round r:                                 j is the partner of i in round r, at random
      H times:  x_i ← InnerOpt(x_i, ∇ℓ(x_i; batch))
      x_i, x_j ← (x_i + x_j) / 2                              exchanged between these two alone

There is no server, no group, and no common round: a worker waits only for its partner. The pairs of a round are a
function of the seed, the round, and the present workers: `strategies.matching`. A mean of two keeps the sum of all x_i,
and pulls them together: of their squared distance from the mean of all, a round leaves (W - 2) / (2W - 2) on
average for an even W, a half for an odd one. The final model is the mean of all x_i, and so is that of a checkpoint,
which has each worker's x_i and inner state besides. Evaluations during the run are of the x_i of the lowest rank, which
costs no exchange.

With one worker it is the inner optimizer alone, bit for bit. Two workers with H = 1 are `local-sgd` with H = 1, to the
rounding of w - (w - w_i), but for the state of the inner optimizer, which stays with each worker in both.

Bytes a round and worker: 4N up and 4N down (float32), whatever W is. A worker that dies costs its partner the exchange
of one round, which continues alone; nobody else notices. What it has learnt since it met somebody dies with it, and its
minibatches are skipped until a new process takes its place, with a copy of another worker's state. They count as
dropped.

References: Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel stochastic gradient descent", 2018 (AD-PSGD);
Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip algorithms", 2006. Different here: pairs meet in rounds, each at its
own time, so that a run can be repeated bit for bit; in AD-PSGD a worker takes its neighbour's parameters whenever it
likes, and its gradient is of older ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.strategies.api import PeerWorker
from gradstream.strategies.base import PeerStrategy, check_count
from gradstream.strategies.matching import partner_of


@dataclass(frozen=True, slots=True)
class Gossip(PeerStrategy):
    """Means of pairs of workers, which change from round to round; see the module.

    Args:
        every: H, minibatches of each worker in a round, at least 1.

    Example:
        >>> strategy = gs.strategies.Gossip(every=4)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["servers"], run.summary["steps"]
        (0, 4)
    """

    every: int = 1

    plain: ClassVar[Mapping[str, object] | None] = {"every": 1}

    def __post_init__(self) -> None:
        check_count("Gossip", "every", self.every, "minibatches")

    def optimizer(self) -> Optimizer:
        """SGD with momentum, on each worker."""
        return SGD(lr=0.01, momentum=0.9)

    async def train(self, worker: PeerWorker) -> None:
        """Each round begins with the parameters of the round before, and ends with the mean of the pair's."""
        async for batch in worker.batches():
            own = await worker.local_steps(batch)
            partner = partner_of(worker.rank, worker.seed, worker.version, worker.num_workers, worker.live)
            received = await worker.exchange_with(partner, [own])
            if received is not None:
                await worker.work(partial(to_mean, own.tensor, received[0].tensor), [received[0]], [own])
            worker.go_on_from(own)


def to_mean(x: torch.Tensor, y: torch.Tensor) -> None:
    """X ← (x + y) / 2, with the same bits at both ends."""
    x.add_(y).mul_(0.5)
