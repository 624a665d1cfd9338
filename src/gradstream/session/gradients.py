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

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from gradstream.errors import ConfigError, GradientError, ReplicasDifferError, UserCodeError
from gradstream.session.bridge import LoopBridge
from gradstream.session.joined import Joined
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
        optimizers: those that make the steps.
        vector: what a round carries.
        handover: the other end of it makes rounds.
        samples: how many are behind the gradients since the round before.
        forget: called at the end of a round: what a backward computes again is not behind the next one.
        loss: of the backward that ends, or NaN.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        vector: JointVector,
        handover: LoopBridge,
        samples: Callable[[], int],
        forget: Callable[[], None],
        loss: Callable[[], float],
    ) -> None:
        self._names = names
        self._optimizers = optimizers
        self._thread = threading.get_ident()
        self._parameters = parameters
        self._vector = vector
        self._bounds = vector.bounds
        self._handover = handover
        self._samples = samples
        self._forget = forget
        self._loss = loss
        self._digest = Digest(dict(zip(names, parameters, strict=True)))
        self._indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._joined = Joined(parameters)
        self._not_finite: set[int] = set()  # of joint gradients, those that are NaN
        self._own_broken: set[int] = set()
        self._outgoing = Outgoing(names, vector.bounds, handover.report)
        self._ending: Callable[[], Callable[[], None] | None] = lambda: None  # what backward will call
        self._rounds = self._steps = 0
        self._alone = False
        for index, parameter in enumerate(parameters):
            self._hook(index, parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> JointGradients:
        """Itself: a copied optimizer or module keeps its hooks, but its parameters are none of the run's."""
        return self

    # ---- what the loop's thread calls ---------------------------------------------------

    @contextmanager
    def no_sync(self, *, nothing: bool = False) -> Iterator[None]:
        """Inside, backward adds this worker's own gradients up; the next one outside joins the sum.

        Args:
            nothing: the minibatch counts no samples, so its gradients are none.
        """
        before, self._alone = self._alone, True
        trained = [parameter for parameter in self._parameters if nothing and parameter.requires_grad]
        hooks = [parameter.register_hook(torch.zeros_like) for parameter in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self._alone = before
            for hook in hooks:
                hook.remove()

    def hello(self) -> None:
        """A round without gradients: returns when all workers are there, with the same parameters."""
        self._begin(silent=True, samples=1)
        self._end()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Joins gradients that no backward has joined, and refuses what cannot be used.

        Where the step has a closure, which makes the gradients, it is done after each call of that.

        Returns:
            None, or the arguments for the step to be made with.

        Raises:
            GradientError: a gradient is not finite. No worker makes the step.
            ConfigError: a parameter that was not there at `wrap`; a gradient that was changed too early.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._join_rest(optimizer)
            return None

        def joined() -> Any:
            loss = closure()
            self._join_rest(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], joined, *args[2:]), kwargs
        return args, {**kwargs, "closure": joined}

    def before_other_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuses a step, of an optimizer that was not wrapped, with gradients that are this worker's alone.

        Within `no_sync` it is meant.

        Raises:
            ConfigError: it has such a parameter.
        """
        if self._alone or threading.get_ident() != self._thread or optimizer in self._optimizers:
            return
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and id(parameter) not in self._indices:
                raise ConfigError(
                    f"step {self._steps}: {type(optimizer).__name__}, which was not wrapped, has a parameter "
                    f"of shape {tuple(parameter.shape)} that no wrapped module or optimizer has, so its "
                    "gradient is of this worker's samples alone: session.wrap([model, ...], [optimizer, "
                    "...]); or make the step within session.no_sync(), where each worker is to have its own"
                )

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """A step was made: everything that was handed over is in the parameters."""
        self._steps += 1
        self._not_finite.clear()
        self._own_broken.clear()
        for index in self._of(optimizer):
            self._joined.stepped(index)
        self._handover.stepped()

    def _join_rest(self, optimizer: torch.optim.Optimizer) -> None:
        if self._outgoing.open:  # of a backward that has failed, the others wait; or this is in one
            self._end()
        mine = self._of(optimizer)
        rest = [index for index in mine if not self._joined.is_joint(index)]
        for index in filter(self._joined.changed_early, rest):
            raise ConfigError(
                f"step {self._steps}: the gradient of {self._names[index]} was clipped, or changed another "
                "way, before it was joined with those of other workers: leave the last backward before that "
                "out of no_sync"
            )
        if rest:
            self._joined.fired.update(rest)
            self._begin()
            self._end(by_hand=True)
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a GradScaler leaves it to this optimizer to pass the step over
        for index in self._not_finite.intersection(mine):
            gradient = self._parameters[index].grad
            if gradient is not None and not _is_finite(gradient):
                whose = "this worker's" if index in self._own_broken else "another worker's"
                raise GradientError(
                    f"step {self._steps}: {whose} gradient of {self._names[index]} has a NaN or an infinity; "
                    "lower the learning rate, scale the inputs, clip the gradient, or use a GradScaler. "
                    "Nothing of it was applied"
                )

    def _of(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Its parameters. Raises ConfigError where one with a gradient is none of the run's."""
        found = []
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            index = self._indices.get(id(parameter))
            if index is not None:
                found.append(index)
            elif parameter.grad is not None:
                raise ConfigError(
                    f"step {self._steps}: the optimizer has a parameter of shape {tuple(parameter.shape)} "
                    "that was not there at wrap, so its gradient is this worker's own: make it before wrap, "
                    "and wrap its module or optimizer as well"
                )
        return found

    # ---- hooks --------------------------------------------------------------------------

    def _hook(self, index: int, parameter: nn.Parameter) -> None:
        def fired(_: torch.Tensor) -> None:
            if parameter.grad is None:
                return  # the user's own hook has made a step of it
            self._joined.fired.add(index)
            if self._alone:
                self._joined.summed(index)
                return
            if not self._outgoing.open:
                self._begin_in_backward()
            elif self._ending() is None:
                raise UserCodeError(
                    "the backward before this one has failed half-way, and part of its gradient has left "
                    "already: this worker cannot go on in step with the others. Resume the run"
                )
            self._write(index)

        trained = parameter.requires_grad
        if parameter.is_floating_point():
            parameter.requires_grad_(True)  # or it takes no hook; it may be unfrozen at any time
            parameter.register_post_accumulate_grad_hook(fired)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)

    def _begin_in_backward(self) -> None:
        def end() -> None:
            self._end()

        Variable._execution_engine.queue_callback(end)
        self._ending = weakref.ref(end)  # backward alone holds it, until it has ended or failed
        self._begin()

    def _begin(self, *, silent: bool = False, samples: int | None = None) -> None:
        samples = self._samples() if samples is None else samples
        self._outgoing.begin(self._handover.open(samples, silent=silent))

    def _write(self, index: int) -> None:
        """A gradient, into its place."""
        if index < len(self._bounds):
            counts = self._handover.counts and self._parameters[index].grad is not None
            self._outgoing.write(index, self._parameters[index].grad if counts else None)

    def _end(self, *, by_hand: bool = False) -> None:
        """The round's end: what has no gradient yet is filled in, and the mean becomes everybody's.

        Args:
            by_hand: no backward has made the gradients.
        """
        if not self._outgoing.open:
            return  # a step that was made within backward has ended it
        for index in range(len(self._bounds)):
            if index not in self._outgoing:
                self._write(index)
        gradient = self._outgoing.finish()
        # A loop may have thrown away what it added up.
        mine = {index for index in self._joined.fired if self._parameters[index].grad is not None}
        name, digest = self._digest.next()
        checks = [self._rounds, self._steps, digest >> 16, digest]
        fired = self._round(gradient, mine, checks, name, by_hand)
        self._rounds += 1
        self._forget()
        self._joined.fired.clear()
        late = [index for index in fired if index >= len(self._bounds)]
        if late:
            self._join_late(late)

    def _round(
        self, gradient: torch.Tensor, fired: set[int], checks: Sequence[int], name: str, by_hand: bool
    ) -> list[int]:
        """Completes a round, and gives the parameters that have a place their gradients."""
        vector, total, broken = self._vector, len(self._parameters), self._outgoing.broken
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
        # What is written by hand is joined by the step of its optimizer, what is set to zero with the others.
        again = {
            i for i in kept.difference(found) if (i in fired if by_hand else not self._joined.is_joint(i))
        }
        for index in fired.difference(found):  # of no samples: as the others have it
            self._parameters[index].grad = None
        for index in {*found, *again}.intersection(range(len(self._bounds))):
            start, stop = self._bounds[index]
            self._give(index, mean[start:stop], index in not_finite, again=index in again)
        return found

    def _give(self, index: int, mean: torch.Tensor, not_finite: bool, *, again: bool = False) -> None:
        parameter = self._parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        with torch.no_grad():
            if not_finite:
                self._not_finite.add(index)
                parameter.grad.fill_(torch.nan)
            else:
                parameter.grad.copy_(mean.view(parameter.shape))
        self._joined.given(index, again=again)

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
            f"step {self._steps}: {name} is not the same on all workers. Something in the script changes "
            "parameters, rates or the optimizer on one worker otherwise than on another: look for "
            "what depends on session.rank, on random numbers without a common seed, or on its own samples"
        )


def _is_finite(gradient: torch.Tensor) -> bool:
    return bool(torch.isfinite(gradient).all())
