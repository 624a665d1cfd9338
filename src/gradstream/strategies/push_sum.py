"""Push-sum: each worker gives half of its sum to one worker, and receives half of another worker's sum.

    worker i, each round:                                   x_i = w_i·z_i, and w_i = 1 at first
      H times:  z_i ← InnerOpt(z_i, ∇ℓ(z_i; batch));   x_i ← x_i + the steps of z_i
      gives (x_i/2, w_i/2) to its successor, and keeps as much
      (x_i, w_i) ← (x_i, w_i)/2 + what its predecessor gives
      z_i ← x_i / w_i

It is SGP, stochastic gradient push. The successor is the same number of places ahead for all n live workers: 1, 2, 4,
... (below n), in turn from round to round (the one-peer exponential graph). So links are used in one direction, and if
n is a power of two, log₂ n rounds without gradients yield the exact mean of all. The sums of all x_i and of all w_i do
not change, and the latter is W; dividing by w_i removes the bias of unequal weights.

A worker whose successor does not get its half keeps both halves. A worker whose predecessor gives nothing has only its
own half, and a smaller weight. So a death costs two workers a part of one round, and removes the dead worker's weight
from the sum: the mean is then over the others. The model is the mean of all z_i. Checkpoints, newcomers, and a lost
worker's minibatches are treated as in `gossip`.

With one worker it is the inner optimizer alone, bit for bit. Two workers are `gossip`, to rounding.

Bytes a round and worker: 4N + 4 up and as many down (float32), whatever W is.

Reference: Assran, Loizou, Ballas, Rabbat, "Stochastic gradient push for distributed deep learning", 2019, Algorithm 1
(H = 1).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.strategies.api import PeerWorker
from gradstream.strategies.base import PeerStrategy, check_count

WEIGHT = "weight"
"""Name of w."""


@dataclass(frozen=True, slots=True)
class PushSum(PeerStrategy):
    """Averaging over a directed graph that changes from round to round, with weights; see the module.

    Args:
        every: H, minibatches of each worker in a round, at least 1.

    Example:
        >>> strategy = gs.strategies.PushSum(every=4)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["servers"], run.summary["steps"]
        (0, 4)
    """

    every: int = 1

    plain: ClassVar[Mapping[str, object] | None] = {"every": 1}

    def __post_init__(self) -> None:
        check_count("PushSum", "every", self.every, "minibatches")

    @property
    def numbers(self) -> Mapping[str, float]:
        """See `PeerStrategy.numbers`: w."""
        return {WEIGHT: 1.0}

    def optimizer(self) -> Optimizer:
        """SGD with momentum, on each worker."""
        return SGD(lr=0.01, momentum=0.9)

    async def train(self, worker: PeerWorker) -> None:
        """Between two rounds a worker has z and w; x is made of them when it is needed."""
        w = worker.numbers[WEIGHT]
        async for batch in worker.batches():
            before, x = worker.parameters, await worker.local_steps(batch)
            to, giver = neighbours(worker.rank, worker.version, worker.live)
            await worker.work(partial(halve, x.tensor, before.tensor, w.tensor), [before], [x, w])
            gave, received = await worker.pass_on(to, giver, [x, w])
            taken = None if received is None else (received[0].tensor, received[1].tensor)
            step = partial(join, x.tensor, w.tensor, taken, keeps=not gave)
            await worker.work(step, list(received or ()), [x, w])
            worker.go_on_from(x)


def neighbours(rank: int, number: int, live: Collection[int]) -> tuple[int | None, int | None]:
    """The successor of a worker in a round, and its predecessor; None if it is alone.

    Args:
        rank: the worker.
        number: number of the round.
        live: ranks of the workers that are there.
    """
    order = sorted(live)
    size = len(order)
    if size < 2 or rank not in order:
        return None, None
    hop, at = 1 << number % (size - 1).bit_length(), order.index(rank)
    return order[(at + hop) % size], order[(at - hop) % size]


def halve(own: torch.Tensor, before: torch.Tensor, weight: torch.Tensor) -> None:
    """Z → x/2, where x = w·z' + (z - z') with the z' before the steps, and w → w/2, in place."""
    own.add_(before * (weight - 1)).mul_(0.5)
    weight.mul_(0.5)


def join(
    half: torch.Tensor,
    weight: torch.Tensor,
    received: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    keeps: bool,
) -> None:
    """x/2 → z = x/w with what was given, in place.

    Args:
        half: x/2, (E,), changed.
        weight: w/2, (1,), changed.
        received: x/2 and w/2 of the predecessor; None without.
        keeps: nobody has received the other half.
    """
    if keeps:
        half.mul_(2)
        weight.mul_(2)
    if received is not None:
        half.add_(received[0])
        weight.add_(received[1])
    half.div_(weight)
