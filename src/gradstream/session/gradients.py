"""Joint gradients: at the end of each backward, `p.grad` is the mean over all workers' samples.

    backward: p.grad is there ──hook──▶ written into the round's vector, which leaves from the front
              the last one    ───────▶ the round ends: every worker has the mean, and copies it into p.grad

So whatever a loop does with gradients and parameters from there on, clipping, skipping, freezing, stepping
with an optimizer of any kind, it does to the same numbers on every worker, and replicas stay the same: as in
`DistributedDataParallel` (Li et al. 2020). Beyond it: means are weighted by samples; a parameter without a
gradient on all workers stays without one; a gradient that a loop has made without backward is joined when its
optimizer makes a step; and replicas that differ all the same are found out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from gradstream.errors import ConfigError, GradientError, ReplicasDifferError, UserCodeError
from gradstream.session.handover import Handover
from gradstream.session.joint import Digest, JointVector
from gradstream.session.outgoing import Outgoing

__all__ = ["JointGradients"]

LATE_ROUNDS = 64
"""The most rounds that gradients of parameters without a place may take."""


class JointGradients:
    """Makes the gradients of some parameters those of all workers.

    Args:
        names: of all parameters, those with a place in the vector first, in its order.
        parameters: likewise.
        vector: what a round carries.
        handover: the other end of it makes rounds.
        samples: how many are behind the gradients since the round before.
        loss: of the backward that ends, or NaN.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        vector: JointVector,
        handover: Handover,
        samples: Callable[[], int],
        loss: Callable[[], float],
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._vector = vector
        self._bounds = vector.bounds
        self._handover = handover
        self._samples = samples
        self._loss = loss
        self._digest = Digest(dict(zip(names, parameters, strict=True)))
        self._hooked: set[int] = set()
        self._fired: set[int] = set()  # since the last round
        self._joint: dict[int, weakref.ref[torch.Tensor]] = {}  # gradients that rounds have given
        self._not_finite: set[int] = set()  # of these, those that are NaN
        self._own_broken: set[int] = set()
        self._outgoing = Outgoing(names, vector.bounds, handover.report)
        self._rounds = self._steps = 0
        self._alone = False
        self.look()

    # ---- what the loop's thread calls ---------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds this worker's own gradients up; the next one outside joins the sum."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def look(self, *_: Any) -> None:
        """Finds parameters that require a gradient by now."""
        if len(self._hooked) == len(self._parameters):
            return
        for index, parameter in enumerate(self._parameters):
            if index not in self._hooked and parameter.requires_grad:
                self._hooked.add(index)
                parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]

    def hello(self) -> None:
        """A round without gradients: returns when all workers are there, with the same parameters."""
        self._begin(silent=True, samples=1)
        self._end()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Joins gradients that no backward has joined, and refuses those that are not finite.

        Raises:
            GradientError: one is not finite. No worker makes the step.
        """
        if (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:  # args[0] is the optimizer
            return  # the closure makes its backward itself
        self.look()
        if self._outgoing.open:  # of a backward that has failed; the others wait
            self._end()
        unjoined = {index for index, p in enumerate(self._parameters) if not self._is_joint(index, p)}
        if unjoined:
            self._fired |= unjoined
            self._begin()
            self._end()
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for index in self._not_finite:
            gradient = self._parameters[index].grad
            if id(self._parameters[index]) in mine and gradient is not None and not _is_finite(gradient):
                whose = "this worker's" if index in self._own_broken else "another worker's"
                raise GradientError(
                    f"step {self._steps}: {whose} gradient of {self._names[index]} has a NaN or an infinity; "
                    "lower the learning rate, scale the inputs, clip the gradient, or use a GradScaler. "
                    "Nothing of it was applied"
                )

    def after_step(self, *_: Any) -> None:
        """A step was made: everything that was handed over is in the parameters."""
        self._steps += 1
        self._not_finite.clear()
        self._own_broken.clear()
        self._handover.stepped()

    # ---- hooks --------------------------------------------------------------------------

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def fired(_: torch.Tensor) -> None:
            self._fired.add(index)
            if self._alone:
                return
            if self._outgoing.open and index in self._outgoing:
                raise UserCodeError(
                    "the backward before this one has failed half-way, and part of its gradient has left "
                    "already: this worker cannot go on in step with the others. Resume the run"
                )
            if not self._outgoing.open:
                Variable._execution_engine.queue_callback(self._end)
                self._begin()
            self._write(index)

        return fired

    def _is_joint(self, index: int, parameter: nn.Parameter) -> bool:
        """Whether its gradient is none, or one that a round has given, whatever became of it since."""
        if parameter.grad is None:
            return True
        given = self._joint.get(index)
        return index not in self._fired and given is not None and given() is parameter.grad

    def _begin(self, *, silent: bool = False, samples: int | None = None) -> None:
        samples = self._samples() if samples is None else samples
        self._outgoing.begin(self._handover.open(samples, silent=silent))

    def _write(self, index: int) -> None:
        """A gradient, into its place."""
        if index < len(self._bounds):
            counts = self._handover.counts and self._parameters[index].grad is not None
            self._outgoing.write(index, self._parameters[index].grad if counts else None)

    def _end(self) -> None:
        """The round's end: what has no gradient yet is filled in, and the mean becomes everybody's."""
        for index in range(len(self._bounds)):
            if index not in self._outgoing:
                self._write(index)
        gradient = self._outgoing.finish()
        late = [index for index in self._fired if index >= len(self._bounds)]
        name, digest = self._digest.next()
        checks = [self._rounds, self._steps, digest >> 16, digest]
        fired = self._round(gradient, self._fired, self._outgoing.broken, checks, name)
        self._rounds += 1
        self._fired.clear()
        missing = [index for index in fired if index >= len(self._bounds)]
        if missing or late:
            self._join_late(missing)

    def _round(
        self, gradient: torch.Tensor, fired: set[int], broken: set[int], checks: Sequence[int], name: str
    ) -> list[int]:
        """Completes a round, and gives the parameters that have a place their gradients."""
        vector, total = self._vector, len(self._parameters)
        held = {index for index, parameter in enumerate(self._parameters) if parameter.grad is not None}
        flags = [[float(index in found) for index in range(total)] for found in (fired, broken, held)]
        vector.finish(gradient, flags, checks)
        self._own_broken |= broken
        mean = self._handover.exchange(self._loss())
        if not self._handover.counts and vector.differing(mean, [self._rounds - 1]) == []:
            for index in fired:  # nobody has samples: it is still the mean of the round before
                self._parameters[index].grad = None
            return []
        self._check(vector.differing(mean, checks), name)
        found, not_finite, kept = vector.fired(mean), vector.broken(mean), vector.held(mean)
        for index in fired.difference(found):  # of no samples: as the others have it
            self._parameters[index].grad = None
        for index in {*found, *(kept & fired)}:
            if index < len(self._bounds):
                start, stop = self._bounds[index]
                self._give(index, mean[start:stop], index in not_finite)
        return found

    def _give(self, index: int, mean: torch.Tensor, not_finite: bool) -> None:
        parameter = self._parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        with torch.no_grad():
            if not_finite:
                self._not_finite.add(index)
                parameter.grad.fill_(torch.nan)
            else:
                parameter.grad.copy_(mean.view(parameter.shape))
        self._joint[index] = weakref.ref(parameter.grad)

    def _join_late(self, indices: Sequence[int]) -> None:
        """Gradients of parameters that were frozen at `wrap`: in rounds of their own, one after the other."""
        sizes = [self._parameters[index].numel() for index in indices]
        room, total = self._vector.room, sum(sizes)
        if total > LATE_ROUNDS * room:
            raise ConfigError(
                f"{self._names[indices[0]]} and {len(indices) - 1} other parameters were frozen at wrap and "
                f"are trained now: {total:,} elements, where {room:,} had a place. Let them require a "
                "gradient when wrap is called, and freeze them after it: they have their place then"
            )
        flat = torch.empty(total, dtype=self._vector.layout.dtype)
        ends = list(accumulate(sizes))
        outgoing = Outgoing(
            [self._names[index] for index in indices], [(e - n, e) for e, n in zip(ends, sizes, strict=True)],
            report=lambda elems: None,
        )  # fmt: skip
        outgoing.begin(flat)
        for place, index in enumerate(indices):
            outgoing.write(place, self._parameters[index].grad)
        outgoing.finish()
        broken = {indices[place] for place in outgoing.broken}
        not_finite: set[int] = set()
        for start in range(0, total, room):
            piece = flat[start : start + room]
            gradient = self._handover.open(self._handover.counts, silent=True)
            gradient[: len(piece)] = piece
            checks = [self._rounds, self._steps, start // room, total]
            flags = [float(index in broken) for index in range(len(self._parameters))]
            self._vector.finish(gradient, [[0.0] * len(flags), flags, [0.0] * len(flags)], checks)
            mean = self._handover.exchange(self._loss())
            self._check(self._vector.differing(mean, checks), self._names[indices[0]])
            not_finite |= self._vector.broken(mean)
            piece.copy_(mean[: len(piece)])
        self._own_broken |= broken
        for index, size, end in zip(indices, sizes, ends, strict=True):
            self._give(index, flat[end - size : end], index in not_finite)

    def _check(self, differing: Sequence[int], name: str) -> None:
        """Raises ReplicasDifferError where the workers are not at the same point of the same training."""
        if not differing:
            return
        if differing[0] < 2:
            raise ReplicasDifferError(
                f"backward {self._rounds}, after {self._steps} steps: the workers have made different "
                "numbers of backward passes or steps. Each must go through the loop as often as the "
                "others: deal minibatches by session.shard, which gives all workers as many"
            )
        raise ReplicasDifferError(
            f"step {self._steps}: parameter {name!r} is not the same on all workers. Something in the script "
            "changes parameters, rates or the optimizer on one worker otherwise than on another: look for "
            "what depends on session.rank, on random numbers without a common seed, or on its own samples"
        )


def _is_finite(gradient: torch.Tensor) -> bool:
    return bool(torch.isfinite(gradient).all())
