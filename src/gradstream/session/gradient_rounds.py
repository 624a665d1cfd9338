"""Rounds in which the workers of a loop average their gradients, and check that they are still in step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from gradstream.errors import ConfigError, ReplicasDifferError
from gradstream.session.agreement import Digest, ReplicaAgreement
from gradstream.session.bridge import LoopBridge
from gradstream.session.gradient_states import WrappedParameters
from gradstream.session.gradient_vector import GradientVector, GradientWriter

LATE_ROUNDS = 64
"""The most rounds that gradients of parameters without a place may take."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A round's mean, the same on every worker.

    Args:
        mean: the mean vector (E,), valid until the next round begins.
        fired: indices of the parameters for which some worker's backward has computed a gradient.
        broken: indices of the parameters for which some worker's gradient has a NaN or an infinity.
        present: indices of the parameters that have a gradient on some worker.
    """

    mean: torch.Tensor
    fired: Sequence[int]
    broken: set[int]
    present: set[int]


@dataclass(frozen=True, slots=True)
class LateGradients:
    """Mean gradients of parameters that have no place in the gradient vector, since they were frozen at `wrap`.

    Args:
        means: flat mean gradient of each parameter.
        broken: indices for which some worker's gradient has a NaN or an infinity.
        own_broken: indices for which this worker's own gradient has a NaN or an infinity.
    """

    means: Mapping[int, torch.Tensor]
    broken: set[int]
    own_broken: set[int]


class GradientRounds:
    """Exchanges gradient vectors with the other workers, and counts rounds and steps.

    Args:
        wrapped: the parameters.
        vector: the vector that a round carries.
        bridge: the worker beside the loop, which makes the exchange.
        loss: returns the loss of the backward that ends, or NaN.

    Attributes:
        steps: number of steps that this loop's wrapped optimizers have made; the caller counts them.
        agreement: makes replicas the same again that rounding has driven apart.
    """

    def __init__(
        self,
        wrapped: WrappedParameters,
        vector: GradientVector,
        bridge: LoopBridge,
        loss: Callable[[], float],
    ) -> None:
        self.steps = 0
        self._rounds = 0
        self._wrapped = wrapped
        self._vector = vector
        self._bridge = bridge
        self._loss = loss
        self.agreement = ReplicaAgreement(wrapped, vector, bridge)
        self._digest = Digest(dict(zip(wrapped.names, wrapped.parameters, strict=True)))

    def exchange(
        self, gradient: torch.Tensor, fired: set[int], broken: set[int], present: set[int], scale: float
    ) -> RoundResult | None:
        """Ends the open round, whose gradients are written, and returns its result.

        Args:
            gradient: the vector (E,) of the open round.
            fired, broken, present: this worker's flags, as indices of parameters.
            scale: by which the gradients are multiplied.

        Returns:
            The result; None if no worker has samples.

        Raises:
            ReplicasDifferError: the workers are not at the same point of the same training.
        """
        vector, total = self._vector, len(self._wrapped.parameters)
        name, digest = self._digest.next()
        checks = [self._rounds, self.steps, 0, 0]
        flags = [[float(index in found) for index in range(total)] for found in (fired, broken, present)]
        vector.finish(gradient, flags, checks, scale, digest)
        mean = self._bridge.exchange(self._loss())
        if not self._bridge.round_samples and vector.differing(mean, [self._rounds - 1]) == []:
            self._rounds += 1
            return None  # the vector is still the mean of the round before
        if vector.differing(mean, checks):
            raise self._out_of_step()
        if vector.checksums_differ(mean):
            self.agreement.suspect(name)  # by rounding, or for good: the workers agree after the step
        self._rounds += 1
        return RoundResult(
            vector.unscaled(mean), vector.fired(mean), vector.broken(mean), vector.present(mean)
        )

    def exchange_late(self, indices: Sequence[int], scale: float) -> LateGradients:
        """Averages gradients of parameters that were frozen at `wrap`, in as many rounds as they need.

        Args:
            indices: indices of the parameters, the same on all workers.
            scale: by which this worker multiplies its gradients.

        Raises:
            ConfigError: the gradients would need more than `LATE_ROUNDS` rounds.
            ReplicasDifferError: see `exchange`.
        """
        names, parameters = self._wrapped.names, self._wrapped.parameters
        sizes = [parameters[index].numel() for index in indices]
        room, total = self._vector.gradient_elems, sum(sizes)
        if total > LATE_ROUNDS * room:
            raise ConfigError(
                f"{names[indices[0]]!r} and {len(indices) - 1} other parameters were frozen at session.wrap and "
                f"have gradients now: {total:,} elements, too many for the {room:,} that wrap has reserved. "
                "Call wrap while these parameters require a gradient, and freeze them afterwards"
            )
        flat = torch.empty(total, dtype=self._vector.layout.dtype)
        bounds = [(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        writer = GradientWriter([names[index] for index in indices], bounds, report=lambda elems: None)
        writer.begin(flat, scale)
        for place, index in enumerate(indices):
            writer.write(place, parameters[index].grad)
        writer.finish()
        own_broken = {indices[place] for place in writer.broken}
        broken: set[int] = set()
        for start in range(0, total, room):
            piece = flat[start : start + room]
            gradient = self._bridge.open(self._bridge.round_samples, silent=True)
            gradient[: len(piece)] = piece
            checks = [self._rounds, self.steps, start // room, total]
            flags = [float(index in own_broken) for index in range(len(parameters))]
            self._vector.finish(gradient, [[0.0] * len(flags), flags, [0.0] * len(flags)], checks, scale)
            mean = self._bridge.exchange(self._loss())
            if self._vector.differing(mean, checks):
                raise self._out_of_step()
            broken |= self._vector.broken(mean)
            piece.copy_(self._vector.unscaled(mean)[: len(piece)])
        means = {index: flat[start:stop] for index, (start, stop) in zip(indices, bounds, strict=True)}
        return LateGradients(means, broken, own_broken)

    def _out_of_step(self) -> ReplicasDifferError:
        """The error where the workers are not at the same point of the same training."""
        return ReplicasDifferError(
            f"backward {self._rounds}, after {self.steps} steps: the workers have made different "
            "numbers of backward passes or steps; expected the same number on every worker. Take "
            "minibatches from session.shard(loader), which gives each worker equally many"
        )
