"""Parameter averaging: each worker trains alone, and all of them take the mean of their parameters.

    client:                                           server, once every worker that takes part has pushed:
      w_i ← Opt(w_i, ∇ℓ(w_i; batch))                    w ← Σ a_i·w_i,   Σ a_i = 1
      every H steps:  push(w_i);  w_i ← fetch()

H = ∞ (`every=None`) is one-shot averaging: the workers average once, at the end. A finite H is periodic averaging,
or local SGD. With one worker w = w_1, whatever H: that is plain SGD, bit for bit.

The weight a_i of worker i is proportional to

    "mean":     1
    "samples":  n_i, its samples since it took part in an average
    "loss":     exp(-ℓ_i), ℓ_i its mean loss over them: the likelihood of the samples that it has seen
    a function: the number that the function returns

Each worker carries out the update rule alone (any rule). The rule's state, such as a velocity, stays with the worker
over all averages. `state="averaged"` averages the state too, with the same weights: another 4N each way for each
vector of the rule, and one more round. The state is then in checkpoints, and a resumed run has it.

Bytes a step and worker: 4N/H up, 4N/H down (float32); one-shot 4N up in all. At each average, once in H steps, all
workers wait for the slowest; minibatches of measured sizes (`shares="measured"`) let them arrive at the same time. A
lost worker is skipped from then on, and the others go through its remaining samples. A worker for which there are
no minibatches waits for no other, and none waits for it.

For a checkpoint everything must be in the model. So workers average then too, after however many steps, and continue
from the mean; a resumed run begins with the mean on all workers. A one-shot run has nothing in the model before its
end, so no checkpoint is due in it; only stopping it makes one.

References: McDonald, Hall, Mann, "Distributed training strategies for the structured perceptron", 2010;
Zinkevich, Weimer, Li, Smola, "Parallelized stochastic gradient descent", 2010 (one-shot); Stich, "Local SGD
converges fast and communicates little", 2019 (periodic). Different here: workers may have made different numbers of
steps, and the weights can be chosen.
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
from gradstream.strategies.api import ServerWorker
from gradstream.strategies.base import Pushes, ServerStrategy, check_choice, check_count
from gradstream.strategies.together import Barrier, train_together

Name = Literal["mean", "samples", "loss"]
Combine = Name | Callable[[Sequence[PushHeader]], Sequence[float]]
"""A name, or a function that returns a number for each contribution (with `rank`, `samples`, `loss`)."""


@dataclass(frozen=True, slots=True)
class Averaged(Barrier):
    """The server: the weighted mean of the parameters of all workers that take part."""

    combine: Combine = "mean"

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """The weights a_i; the weight of a single worker is exactly 1.

        Raises:
            UserCodeError: the numbers of `combine` have no finite, positive sum.
        """
        there = [one for one in update if not one.empty]  # without users' loops that have ended
        if not there:
            return [0.0] * len(update)
        raw = self._raw(there)
        total = math.fsum(raw)
        if len(raw) != len(there) or not (math.isfinite(total) and total > 0.0):
            raise UserCodeError(
                f"combine returned the weights {list(raw)} for the parameters of {len(there)} workers; expected a "
                "finite number for each worker, with a sum above 0"
            )
        weights = iter(raw)
        return [0.0 if one.empty else next(weights) / total for one in update]

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
    """exp(-ℓ_i), times a common factor, without which all could underflow to 0."""
    for one in update:
        if math.isnan(one.loss):
            raise UserCodeError(
                f"combine='loss', but {one.sender} reports no loss: let the model's gradients() return "
                "(loss, gradients)"
            )
    least = min(one.loss for one in update)
    return [math.exp(least - one.loss) for one in update]


@dataclass(frozen=True, slots=True)
class ParameterAveraging(ServerStrategy):
    """One-shot and periodic parameter averaging; see the module.

    Args:
        every: H, local steps between two averages, at least 1; None averages once, at the end.
        combine: how the weights are chosen: "mean", "samples", "loss", or a function; see the module.
        state: whether the update rule's state, such as a velocity, is each worker's "own", or "averaged" too.

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
        """SGD with momentum, on the workers."""
        return SGD(lr=0.01, momentum=0.9)

    def outer_optimizer(self, inner: Optimizer) -> Optimizer:
        """The shards take the weighted mean as it is: of the parameters, and of the state where it is averaged."""
        return Replace(states=inner.state_names if self.state == "averaged" else (), begin=inner.state_init)

    async def train(self, worker: ServerWorker) -> None:
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
        """The weighted mean; see `Averaged`."""
        return Averaged(frozenset(range(num_workers)), self.combine)
