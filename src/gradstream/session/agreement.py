"""Keeps replicas equal on machines that round differently, and finds replicas that differ for another reason.

Every worker makes the same step from the same mean gradient, but different processors or thread counts round it
differently, so replicas drift apart by one rounding per step. The script is not at fault. When checksums of the
parameters differ, the workers average the parameters p and the vectors of optimizer state in extra rounds after a
step. Each worker takes the mean p̄, which has the same bits on all.

    |p - p̄| ≤ MARGIN · ε · √(steps since the last agreement) · max |p̄|     rounding; max over all parameters
    otherwise, on any worker                                                the scripts differ: every worker raises

All workers share one gradient, so rounding errors are not amplified: they grow with the square root of the number of
steps. After the first agreement, the workers agree again every `EVERY` steps and at the end. A run on machines that
round alike never agrees, and has the same bits as a loop without this module.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from gradstream.errors import ConfigError, ReplicasDifferError
from gradstream.session.bridge import LoopBridge
from gradstream.session.gradient_states import WrappedParameters
from gradstream.session.gradient_vector import GradientVector, GradientWriter

# ---- agreement ---------------------------------------------------------------------------

EVERY = 500
"""Steps between two agreements. An agreement sends a full vector for the parameters and for each state vector."""

MARGIN = 64.0
"""Roundings in one step, with a margin for update rules that round many times."""

_BY_INDEX = (
    ". A worker has come on the way, and its enumerate(loader) began at 0: let no step, and no break, depend on "
    "the index"
)

_NEWCOMER = (
    ". This worker came last, so it is lost, and the others go on: register what changes its steps "
    "(session.register(scheduler=scheduler)), and take the length of a schedule from what is the same for all"
)

MARK = 0xA6EE
"""Marks a round of an agreement, so that a worker in any other round is detected."""


class ReplicaAgreement:
    """Makes parameters and optimizer state of all workers the same.

    Args:
        wrapped: the parameters, and their optimizers.
        vector: the vector that a round carries.
        bridge: the worker beside the loop, which makes the exchange.
    """

    def __init__(
        self,
        wrapped: WrappedParameters,
        vector: GradientVector,
        bridge: LoopBridge,
    ) -> None:
        self._wrapped = wrapped
        self._vector = vector
        self._bridge = bridge
        self._suspect = ""  # names of the parameters whose checksums differed
        self._since = 0  # step of the last agreement
        self._made = 0  # number of agreements

    @property
    def newest(self) -> tuple[int, ...]:
        """See `Roster.newest`."""
        return self._bridge.roster.newest

    @property
    def place(self) -> tuple[str, int, int]:
        """What a newcomer has to know of earlier steps."""
        return self._suspect, self._since, self._made

    @place.setter
    def place(self, place: tuple[str, int, int]) -> None:
        """Goes on from there."""
        self._suspect, self._since, self._made = place

    def suspect(self, names: str) -> None:
        """Records that the checksums of these parameters differ. Every worker calls it in the same round."""
        self._suspect = names

    def after_step(self, step: int) -> None:
        """Agrees if checksums have differed and the last agreement is `EVERY` steps old. All workers are at this step.

        Raises:
            ReplicasDifferError: the replicas differ by more than rounding, or a worker is at another step.
        """
        if self._suspect and (not self._made or step - self._since >= EVERY):
            self._agree(step)

    @property
    def needed(self) -> bool:
        """Whether replicas have ever differed. The same on every worker."""
        return bool(self._made or self._suspect)

    def at_end(self, step: int) -> None:
        """Agrees a last time. Raises the errors of `after_step`."""
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
        # Parameters without a place in the vector were frozen at `wrap`, so they have no reason to differ.
        fixed = checksum(self._wrapped.parameters[len(parameters) :])
        last = self._mean([None] * len(parameters), step, len(vectors), far, (fixed >> 16, fixed))
        broken, newest = self._vector.broken(last), self.newest
        if broken and newest and self._bridge.rank not in newest:
            # Who came last leaves the run. If the others differ too, the next checksums tell.
            self._suspect = ""
            return
        if broken:
            name, differing = self._wrapped.names[min(broken)], means[0][min(broken)]
            own = parameters[min(broken)].detach().flatten().to(differing.dtype)
            apart = float((own - differing).abs().max())
            raise ReplicasDifferError(
                f"step {step}: {self._suspect or name} is not the same on all workers, and rounding cannot explain it: "
                f"{name!r} differs by up to {apart:.3g} from the mean over the workers, whose largest element is "
                f"{float(differing.abs().max()):.3g}. The script makes different steps on different workers: "
                "look for learning rates, random numbers or branches that depend on session.rank or on this worker's "
                f"own samples{_NEWCOMER if newest else ''}"
            )
        with torch.no_grad():
            for tensors, mean_of in zip(vectors, means, strict=True):
                for tensor, other in zip(tensors, mean_of, strict=True):
                    if tensor is not None:
                        tensor.copy_(other.view(tensor.shape))
        self._suspect, self._since, self._made = "", step, self._made + 1

    def _state(self) -> list[Sequence[torch.Tensor | None]]:
        """Optimizer state vectors with the shape of their parameter: one list over all parameters for each name."""
        by_parameter: list[Mapping[Any, Any]] = [
            next((opt.state[parameter] for opt in self._wrapped.optimizers if parameter in opt.state), {})
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
        """Averages a vector over all workers, in a round that belongs to no step."""
        checks = [MARK + number, step, *fixed]
        none = [0.0] * len(self._wrapped.parameters)
        flags = [none, [float(index in far) for index in range(len(none))], none]

        def write(into: torch.Tensor) -> None:
            for tensor, (start, stop) in zip(tensors, self._vector.bounds, strict=True):
                if tensor is None:
                    into[start:stop].zero_()
                else:
                    into[start:stop].copy_(tensor.detach().flatten())
            self._vector.finish(into, flags, checks)

        write(self._bridge.open(1, silent=True))
        mean = self._bridge.exchange(math.nan, write)
        if differing := self._vector.differing(mean, checks):
            what = (
                "a parameter that was frozen at session.wrap"
                if differing[0] > 1
                else "the number of its steps"
            )
            raise ReplicasDifferError(
                f"step {step}: {what} is not the same on all workers, or a worker has ended; expected the same script "
                "on each, and minibatches from session.shard(loader), which gives every worker the same number"
            )
        return mean


def _rounded(own: torch.Tensor, mean: torch.Tensor, room: float) -> bool:
    """Whether rounding alone can explain how far a parameter is from the mean over the workers."""
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
    """Computes checksums of a replica's parameters, piece by piece, to find replicas that have drifted apart.

    Each call covers the next piece, so a difference is found after at most as many rounds as there are pieces.

    Args:
        parameters: the parameters by name.
    """

    PIECE_ELEMS = 1 << 13

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = list(parameters.items())
        self._begin = 0
        self._index = 0

    @property
    def place(self) -> tuple[int, int]:
        """Where the next piece begins."""
        return self._begin, self._index

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        """Begins the next piece there."""
        self._begin, self._index = place

    def next(self) -> tuple[str, int]:
        """Returns (names of the covered parameters, for messages; their 32-bit checksum)."""
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


# ---- gradient rounds ---------------------------------------------------------------------
# Rounds in which workers average their gradients and check that they are still in step.

LATE_ROUNDS = 64
"""The most rounds that gradients without a place in the vector may take."""


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
    """Mean gradients of parameters without a place in the gradient vector: they were frozen at `wrap`.

    Args:
        means: flat mean gradient of each parameter, by index.
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
        agreement: makes replicas equal again that rounding has driven apart.
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
        self._latest = -1  # the latest round in which some worker had samples
        self._wrapped = wrapped
        self._vector = vector
        self._bridge = bridge
        self._loss = loss
        self.agreement = ReplicaAgreement(wrapped, vector, bridge)
        self._digest = Digest(dict(zip(wrapped.names, wrapped.parameters, strict=True)))
        self._before = self._numbers()

    def saved(self) -> list[Any]:
        """The numbers in which all workers agree, before the round that is under way."""
        return self._before

    def load(self, saved: Sequence[Any]) -> None:
        """Goes on from what `saved` of another worker has returned."""
        self._rounds, self._latest, self.steps, digest, agreement = saved
        self._digest.place, self.agreement.place = tuple(digest), tuple(agreement)

    def _numbers(self) -> list[Any]:
        return [self._rounds, self._latest, self.steps, self._digest.place, self.agreement.place]

    def exchange(
        self,
        gradient: torch.Tensor,
        fired: set[int],
        broken: set[int],
        present: set[int],
        scale: float,
        rewrite: Callable[[torch.Tensor], None],
    ) -> RoundResult | None:
        """Submits the filled vector of the open round and waits for the result.

        Args:
            gradient: the vector (E,) of the open round.
            fired, broken, present: this worker's flags, as indices of parameters.
            scale: factor by which this worker has multiplied its gradients.
            rewrite: writes the gradients again, into another vector (E,): see `LoopBridge.exchange`.

        Returns:
            The result; None if no worker has samples.

        Raises:
            ReplicasDifferError: the workers are not at the same point of the same training.
        """
        vector, total = self._vector, len(self._wrapped.parameters)
        self._before = self._numbers()
        name, digest = self._digest.next()
        checks = [self._rounds, self.steps, 0, 0]
        flags = [[float(index in flagged) for index in range(total)] for flagged in (fired, broken, present)]
        vector.finish(gradient, flags, checks, scale, digest)

        def write(into: torch.Tensor) -> None:
            rewrite(into)
            vector.finish(into, flags, checks, scale, digest)

        mean = self._bridge.exchange(self._loss(), write)
        if not self._bridge.round_samples and vector.differing(mean, [self._latest]) == []:
            self._rounds += 1
            return None  # the vector is still the mean of that round
        if vector.differing(mean, checks):
            raise self._out_of_step()
        if vector.checksums_differ(mean):
            self.agreement.suspect(name)  # the agreement after the step tells rounding from a real difference
        self._latest, self._rounds = self._rounds, self._rounds + 1
        return RoundResult(
            vector.unscaled(mean), vector.fired(mean), vector.broken(mean), vector.present(mean)
        )

    def mean_loss(self, loss: Any, scale: float) -> Any:
        """The mean of a loss over all workers, weighted as the gradients of the last round, in a round of its own.

        Args:
            loss: what a closure has returned.
            scale: factor by which this worker has multiplied its gradients.

        Raises:
            ConfigError: it is no number.
            ReplicasDifferError: see `exchange`.
        """
        try:
            own = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"optimizer.step: the closure returned a {type(loss).__name__}, expected the loss, for the search"
            ) from error
        count, none = self._bridge.round_samples, [0.0] * len(self._wrapped.parameters)
        checks = [self._rounds, self.steps, 0, 0]

        def write(into: torch.Tensor) -> None:
            into.zero_()
            into[0] = own * scale if count else 0.0
            self._vector.finish(into, [none, none, none], checks, scale)

        write(self._bridge.open(count, silent=True))
        mean = self._bridge.exchange(math.nan, write)
        if self._vector.differing(mean, checks):
            raise self._out_of_step()
        found = float(self._vector.unscaled(mean)[0])
        return loss.new_tensor(found) if isinstance(loss, torch.Tensor) else found

    def end(self) -> None:
        """Ends the rounds. If replicas have ever differed, a last agreement gives them the same bits.

        A worker whose loop ends before the other workers' loops skips this; `close` gives it the final parameters.
        """
        if self.agreement.needed and not self._others_train():
            self.agreement.at_end(self.steps)

    def _others_train(self) -> bool:
        """Whether another worker still makes rounds, found by a round to which this worker adds no samples."""
        none = [0.0] * len(self._wrapped.parameters)

        def write(into: torch.Tensor) -> None:
            self._vector.finish(into.zero_(), [none, none, none], [self._rounds, self.steps, 0, 0])

        write(self._bridge.open(0, silent=True))
        mean = self._bridge.exchange(math.nan, write)  # the previous mean if no worker has samples
        return not self._vector.differing(mean, [self._rounds])

    def exchange_late(self, indices: Sequence[int], scale: float) -> LateGradients:
        """Averages gradients of parameters that were frozen at `wrap`, in as many rounds as they need.

        Args:
            indices: indices of the parameters, the same on all workers.
            scale: factor by which this worker multiplies its gradients.

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
                f"have gradients now: {total:,} elements, too many for the {room:,} that wrap reserved. "
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
            checks = [self._rounds, self.steps, start // room, total]
            flags = [float(index in own_broken) for index in range(len(parameters))]
            all_flags = [[0.0] * len(flags), flags, [0.0] * len(flags)]

            def write(
                into: torch.Tensor,
                piece: torch.Tensor = piece,
                checks: Sequence[int] = checks,
                all_flags: Sequence[Sequence[float]] = all_flags,
            ) -> None:
                into[: len(piece)] = piece
                self._vector.finish(into, all_flags, checks, scale)

            write(self._bridge.open(self._bridge.round_samples, silent=True))
            mean = self._bridge.exchange(self._loss(), write)
            if self._vector.differing(mean, checks):
                raise self._out_of_step()
            broken |= self._vector.broken(mean)
            piece.copy_(self._vector.unscaled(mean)[: len(piece)])
        means = {index: flat[start:stop] for index, (start, stop) in zip(indices, bounds, strict=True)}
        return LateGradients(means, broken, own_broken)

    def _out_of_step(self) -> ReplicasDifferError:
        """The error for workers that are not at the same point of the same training."""
        return ReplicasDifferError(
            f"backward {self._rounds}, after {self.steps} steps: the workers have made different "
            "numbers of backward passes or steps; expected the same number on every worker. Take "
            "minibatches from session.shard(loader), which gives each worker equally many"
            f"{_BY_INDEX if self.agreement.newest else ''}"
        )
