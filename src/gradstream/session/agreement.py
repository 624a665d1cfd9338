"""Keeps replicas together whose machines round differently, and finds those that differ for another reason.

Every worker makes the same step of the same mean gradient, and yet processors of other kinds, or other numbers of
threads, round it differently: two replicas drift apart by a rounding a step. That is no fault of the script. So where
checksums of the parameters differ, the workers exchange the parameters themselves once, in rounds of their own after a
step, and each takes the mean p̄, which has the same bits on all. Likewise the vectors of the optimizers' state.

    |p - p̄| ≤ MARGIN · ε · √(steps since the last agreement) · max |p̄|     rounding; max over all parameters
    otherwise on any worker                                                 the scripts differ: no worker goes on

The gradient is one for all, so what rounding has added is not amplified: it grows with the root of the number of steps.
From then on the workers agree anew after `EVERY` steps, and at the end: the final parameters have the same bits on all.
A run on machines that round alike never gets here, and has the bits of a loop without this.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradstream.errors import ReplicasDifferError
from gradstream.session.bridge import LoopBridge
from gradstream.session.gradient_states import WrappedParameters
from gradstream.session.gradient_vector import GradientVector

EVERY = 500
"""Steps between two agreements. One exchanges as much as a step does for the parameters, and each vector of state."""

MARGIN = 64.0
"""Roundings of one step, with room for rules that round many times."""

MARK = 0xA6EE
"""Marks a round of an agreement: who makes another round at that time does something else."""


class ReplicaAgreement:
    """Makes parameters and optimizer state of all workers the same.

    Args:
        wrapped: the parameters, and their optimizers.
        vector: the vector that a round carries.
        bridge: the worker beside the loop, which makes the exchange.
    """

    def __init__(self, wrapped: WrappedParameters, vector: GradientVector, bridge: LoopBridge) -> None:
        self._wrapped = wrapped
        self._vector = vector
        self._bridge = bridge
        self._suspect = ""  # names parameters whose checksums have differed
        self._since = 0  # step of the last agreement
        self._made = 0  # number of agreements

    def suspect(self, names: str) -> None:
        """Notes, on all workers in the same round, that the checksums of these parameters differ."""
        self._suspect = names

    def after_step(self, step: int) -> None:
        """Agrees, if checksums have differed and the last agreement is long ago. All workers are at this step.

        Raises:
            ReplicasDifferError: the replicas differ by more than rounding, or a worker is elsewhere.
        """
        if self._suspect and (not self._made or step - self._since >= EVERY):
            self._agree(step)

    def at_end(self, step: int) -> None:
        """Agrees a last time, if replicas have ever differed. Raises as `after_step`."""
        if self._made or self._suspect:
            self._agree(step)

    def _agree(self, step: int) -> None:
        parameters = self._wrapped.parameters[: len(self._vector.bounds)]
        vectors: list[Sequence[torch.Tensor | None]] = [parameters, *self._state()]
        room, means = math.sqrt(max(1, step - self._since)), list[list[torch.Tensor]]()
        far: set[int] = set()
        for number, tensors in enumerate(vectors):
            mean = self._mean(tensors, step, number, far)
            means.append([mean[start:stop].clone() for start, stop in self._vector.bounds])
            if not number:
                room *= max((float(other.abs().max()) for other in means[0] if len(other)), default=0.0)
                far = {
                    index
                    for index, (own, other) in enumerate(zip(parameters, means[0], strict=True))
                    if not _rounded(own, other, room)
                }
        # What has no place in the vector was frozen at `wrap`, and has no reason to differ.
        fixed = checksum(self._wrapped.parameters[len(parameters) :])
        last = self._mean([None] * len(parameters), step, len(vectors), far, (fixed >> 16, fixed))
        if broken := self._vector.broken(last):
            name, differing = self._wrapped.names[min(broken)], means[0][min(broken)]
            own = parameters[min(broken)].detach().flatten().to(differing.dtype)
            apart = float((own - differing).abs().max())
            raise ReplicasDifferError(
                f"step {step}: {self._suspect or name} is not the same on all workers, by more than processors round "
                f"differently: {name!r} is {apart:.3g} from the mean of all here, of numbers up to "
                f"{float(differing.abs().max()):.3g}. The script makes another step on one worker than on the others: "
                "look for learning rates, random numbers or branches that depend on session.rank or on this worker's "
                "own samples"
            )
        with torch.no_grad():
            for tensors, mean_of in zip(vectors, means, strict=True):
                for tensor, other in zip(tensors, mean_of, strict=True):
                    if tensor is not None:
                        tensor.copy_(other.view(tensor.shape))
        self._suspect, self._since, self._made = "", step, self._made + 1

    def _state(self) -> list[Sequence[torch.Tensor | None]]:
        """The vectors of the optimizers' state that are as long as their parameters, by name, for all parameters."""
        by_parameter: list[Mapping[Any, Any]] = [
            next((one.state[parameter] for one in self._wrapped.optimizers if parameter in one.state), {})
            for parameter in self._wrapped.parameters[: len(self._vector.bounds)]
        ]
        vectors: dict[str, list[torch.Tensor | None]] = {}
        for index, (state, parameter) in enumerate(zip(by_parameter, self._wrapped.parameters, strict=False)):
            for name, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape == parameter.shape
                    and value.is_floating_point()
                ):
                    vectors.setdefault(str(name), [None] * len(by_parameter))[index] = value
        return [vectors[name] for name in sorted(vectors)]

    def _mean(
        self,
        tensors: Sequence[torch.Tensor | None],
        step: int,
        number: int,
        far: set[int],
        fixed: tuple[int, int] = (0, 0),
    ) -> torch.Tensor:
        """The mean of all workers' vectors, by a round that belongs to no step."""
        checks = [MARK + number, step, *fixed]
        into = self._bridge.open(1, silent=True)
        for tensor, (start, stop) in zip(tensors, self._vector.bounds, strict=True):
            if tensor is None:
                into[start:stop].zero_()
            else:
                into[start:stop].copy_(tensor.detach().flatten())
        none = [0.0] * len(self._wrapped.parameters)
        flags = [none, [float(index in far) for index in range(len(none))], none]
        self._vector.finish(into, flags, checks)
        mean = self._bridge.exchange(math.nan)
        if differing := self._vector.differing(mean, checks):
            what = (
                "a parameter that was frozen at session.wrap"
                if differing[0] > 1
                else "the number of its steps"
            )
            raise ReplicasDifferError(
                f"step {step}: {what} is not the same on all workers, or one of them has ended; expected the same "
                "script on each, and minibatches from session.shard(loader), which gives each equally many"
            )
        return mean


def _rounded(own: torch.Tensor, mean: torch.Tensor, room: float) -> bool:
    """Whether a parameter differs from the mean of all by no more than rounding can have added."""
    flat = own.detach().flatten().to(mean.dtype)
    apart = torch.where(flat == mean, 0.0, (flat - mean).abs())  # infinities may be equal
    return bool((apart <= MARGIN * torch.finfo(own.dtype).eps * room).all())  # False for NaN


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """A 32-bit checksum of whole tensors."""
    digest = 0
    for tensor in tensors:
        data = tensor.detach().flatten().cpu().contiguous().view(torch.uint8)
        digest = zlib.crc32(data.numpy().tobytes(), digest)
    return digest


class Digest:
    """Computes a checksum of a replica's parameters, to find replicas that have drifted apart.

    Each call covers another piece, so a difference is found within as many rounds as there are pieces, and
    in a small model at once.

    Args:
        parameters: the parameters by name.
    """

    PIECE_ELEMS = 1 << 13

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = list(parameters.items())
        self._begin = 0
        self._index = 0

    def next(self) -> tuple[str, int]:
        """(names of the parameters that are covered, for messages; their 32-bit checksum)."""
        first, left, digest, names = self._index, self.PIECE_ELEMS, 0, list[str]()
        while left > 0 and (not names or self._begin or self._index != first):
            name, parameter = self._parameters[self._index]
            names.append(name)
            flat = parameter.detach().flatten()  # no copy where it is contiguous
            piece = flat[self._begin : self._begin + left]
            digest = zlib.crc32(piece.cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest)
            left -= len(piece)
            self._begin += len(piece)
            if self._begin >= len(flat):
                self._begin, self._index = 0, (self._index + 1) % len(self._parameters)
        covered = f"parameter {names[0]!r}" if len(names) == 1 else f"one of {names[0]!r} to {names[-1]!r}"
        return covered, digest
