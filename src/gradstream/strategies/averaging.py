"""Parameter averaging: each worker trains alone, and all take the mean of where they have got to.

    client:                                           server, once all who take part have pushed:
      w_i ← Opt(w_i, ∇ℓ(w_i; batch))                    w ← Σ a_i·w_i,   Σ a_i = 1
      every H steps:  push(w_i);  w_i ← fetch()

H = ∞ (`every=None`) is one-shot averaging: the workers meet once, at the end. A finite H is periodic
averaging, or local SGD. With one worker w = w_1, whatever H: it is plain SGD, bit for bit.

How w_1 and w_2 are put together, a_i in proportion to

    "mean":     1
    "samples":  n_i, those that worker i has gone through since it took part in an average
    "loss":     exp(-ℓ_i), ℓ_i its mean loss over them: the likelihood of what it has seen
    a function: whatever it returns

The update rule is carried out by each worker alone (any rule), and its state, a velocity for one, stays with
the worker over all averages. `state="averaged"` averages that too, alike: another 4N each way for each of the
rule's vectors, and a round more; then it is in checkpoints, and a resumed run has it.

Bytes a step and worker: 4N/H up, 4N/H down (float32); one-shot 4N up in all. Everybody waits for the slowest
at each average, so once in H steps; minibatches of measured sizes (`shares="measured"`) let all be there at
the same time. A lost worker is left out from then on, and the others go through what is left. A worker for
which there are no minibatches waits for nobody and keeps nobody waiting.

A cut brings everything into the model, so workers average for a checkpoint too, with however many steps they
have made, and go on from the mean. A resumed run begins with the mean on all workers. Of a one-shot run
nothing is in the model before its end, so no checkpoint is due; only stopping it makes one.

References: McDonald, Hall, Mann, "Distributed training strategies for the structured perceptron", 2010;
Zinkevich, Weimer, Li, Smola, "Parallelized stochastic gradient descent", 2010 (one-shot); Stich, "Local SGD
converges fast and communicates little", 2019 (periodic). Different here: workers need not have made as many
steps, and it can be chosen how each counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from gradstream.data.base import Partitioning
from gradstream.errors import UnknownNameError, UserCodeError
from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.optim.merge import Replace
from gradstream.server.aggregation import AggregationRule, PushHeader
from gradstream.strategies.api import Worker
from gradstream.strategies.base import Pushes, Strategy
from gradstream.strategies.checks import check_choice, check_count
from gradstream.strategies.together import Barrier, train_together

__all__ = ["Averaged", "Combine", "ParameterAveraging"]

Name = Literal["mean", "samples", "loss"]
Combine = Name | Callable[[Sequence[PushHeader]], Sequence[float]]
"""A name, or a function of contributions (with `rank`, `samples`, `loss`) that gives each a number."""


@dataclass(frozen=True, slots=True)
class Averaged(Barrier):
    """The server: the weighted mean of the parameters of all who take part."""

    combine: Combine = "mean"

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """a_i; of a single worker exactly 1.

        Raises:
            UserCodeError: they have no finite, positive sum.
        """
        raw = self._raw(update)
        total = math.fsum(raw)
        if len(raw) != len(update) or not (math.isfinite(total) and total > 0.0):
            raise UserCodeError(
                f"the parameters of {len(update)} workers are to be combined in proportion to {list(raw)}; "
                "expected a finite number for each, with a sum above 0"
            )
        return [weight / total for weight in raw]

    def _raw(self, update: Sequence[PushHeader]) -> Sequence[float]:
        if self.combine == "mean":
            return [1.0] * len(update)
        if self.combine == "samples":
            weights = [float(one.samples) for one in update]
            return weights if any(weights) else [1.0] * len(update)
        if self.combine == "loss":
            return _likelihoods(update)
        assert callable(self.combine)
        try:
            return [float(weight) for weight in self.combine(update)]
        except Exception as error:
            raise UserCodeError(f"combine raised {type(error).__name__}: {error}") from error


def _likelihoods(update: Sequence[PushHeader]) -> list[float]:
    """exp(-ℓ_i), times a number that keeps them from vanishing all together."""
    for one in update:
        if math.isnan(one.loss):
            raise UserCodeError(
                f"combine='loss', and {one.sender} knows no loss: the model's gradients() has to return "
                "(loss, gradients)"
            )
    least = min(one.loss for one in update)
    return [math.exp(least - one.loss) for one in update]


@dataclass(frozen=True, slots=True)
class ParameterAveraging(Strategy):
    """One-shot and periodic parameter averaging; see the module.

    Args:
        every: H, local steps between two averages, at least 1; None averages once, at the end.
        combine: "mean", "samples", "loss", or a function; see the module.
        state: of the update rule, a velocity for one: each worker's "own", or "averaged", too.

    Example:
        >>> strategy = gs.ParameterAveraging(every=4)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["pushes"]
        (16, 5)
    """

    every: int | None = 10
    combine: Combine = "mean"
    state: Literal["own", "averaged"] = "own"

    partitioning: ClassVar[Partitioning] = "partitions"
    survives_worker_loss: ClassVar[bool] = True
    pushes: ClassVar[Pushes] = "parameters"
    plain: ClassVar[Mapping[str, object] | None] = {}

    def __post_init__(self) -> None:
        if self.every is not None:
            check_count("ParameterAveraging", "every", self.every, "steps", other=", or None for once")
        check_choice("ParameterAveraging", "combine", self.combine, get_args(Name))
        if self.state not in ("own", "averaged"):
            raise UnknownNameError("state of ParameterAveraging", self.state, ("own", "averaged"))

    def optimizer(self) -> Optimizer:
        """Of the workers: SGD with momentum."""
        return SGD(lr=0.01, momentum=0.9)

    def outer_optimizer(self, inner: Optimizer) -> Optimizer:
        """The mean is what the shards have; where state is averaged, of that too."""
        return Replace(states=inner.state_names if self.state == "averaged" else (), begin=inner.state_init)

    async def train(self, worker: Worker) -> None:
        """The client."""
        server, averaged = worker.server, self.state == "averaged"

        async def push() -> None:
            parameters = worker.take_parameters()
            await server.push_soon(parameters)
            for state in worker.take_state(parameters) if averaged else ():
                await server.push_soon(state)

        async def fetch() -> None:
            await worker.pull()
            if averaged:
                await worker.refresh_state()
            await server.flush()

        await train_together(worker, self.every, push, fetch)

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """See `Averaged`."""
        return Averaged(frozenset(range(num_workers)), self.combine)
