"""Averages gradients: at the end of each backward, `p.grad` is the mean over all workers' samples.

    backward: p.grad is there ──hook──▶ written into the round's vector, which leaves from the front
              the last one    ───────▶ the round ends: every worker has the mean, and copies it into p.grad

Whatever the loop then does with gradients and parameters (clip, skip, freeze, step with any optimizer) it does to the
same numbers on every worker, so replicas stay equal, as in `DistributedDataParallel` (Li et al. 2020). In addition,
means are weighted by samples; a parameter without a gradient on any worker gets none; a gradient that the loop writes
itself is averaged at its optimizer's step; and replicas that differ nevertheless are detected.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from gradstream.errors import ConfigError, GradientError, UserCodeError
from gradstream.session.agreement import GradientRounds
from gradstream.session.bridge import LoopBridge
from gradstream.session.gradient_states import (
    ComputedGradients,
    GradientStates,
    LocalPasses,
    WrappedParameters,
)
from gradstream.session.gradient_vector import GradientVector, GradientWriter
from gradstream.session.samples import PassSamples, SampleCount, joined, whole


class GradientReducer:
    """Replaces the gradients of wrapped parameters by their means over all workers.

    Args:
        wrapped: the parameters, and the optimizers that step them.
        vector: the vector that a round carries.
        bridge: the worker beside the loop, which exchanges the vectors.
        samples: returns the number of samples in a round's gradients, given the passes made in `no_sync`.
        counted: the samples of passes. It is cleared at the end of a backward, so that forward passes repeated by
            activation checkpointing do not count for the next backward.
        loss: returns the loss of the backward that ends, or NaN.

    Attributes:
        rounds: exchanges the vectors.
    """

    def __init__(
        self,
        wrapped: WrappedParameters,
        vector: GradientVector,
        bridge: LoopBridge,
        samples: Callable[[Sequence[PassSamples]], float],
        counted: SampleCount,
        loss: Callable[[], float],
    ) -> None:
        self._thread = threading.get_ident()
        self._wrapped = wrapped
        self._bounds = vector.bounds
        self._bridge = bridge
        self._samples = samples
        self._counted = counted
        self.rounds = GradientRounds(wrapped, vector, bridge, loss)
        self._states = GradientStates(wrapped.parameters)
        self._local = LocalPasses(wrapped.parameters)
        self._computed = ComputedGradients()
        self._writer = GradientWriter(wrapped.names, vector.bounds, bridge.report)
        self._end_of_backward: Callable[[], Callable[[], None] | None] = lambda: None
        self._is_local = False  # in no_sync
        self._is_repeat = False
        self._hooks: list[RemovableHandle] = []
        for index, parameter in enumerate(wrapped.parameters):
            self._hook(index, parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReducer:
        """Returns itself: a copied optimizer or module keeps its hooks, but its parameters are not the run's."""
        return self

    # ---- called by the loop's thread ----------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates this worker's own gradients; the next backward outside averages the sum."""
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    def synchronize(self) -> None:
        """Waits for all workers, by a round that belongs to no step. They have the same parameters then.

        The round averages what passes in `no_sync` have accumulated.
        """
        local = self._local.take()
        self._begin(silent=True, samples=joined(local) if local else 1)
        self._end()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Averages gradients that no backward has averaged, and refuses unusable ones.

        If the step has a closure that computes the gradients, this happens after each call of the closure, and LBFGS,
        which searches by the loss that the closure returns, gets its mean over the samples of all workers.

        Returns:
            None, or the arguments for the step.

        Raises:
            GradientError: a gradient is not finite. No worker makes the step.
            ConfigError: a parameter was added after `wrap`, or a gradient was changed before it was averaged.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._average_rest(optimizer)
            return None

        said, searches = self._counted.said, isinstance(optimizer, torch.optim.LBFGS)

        def averaged() -> Any:
            if said is not None:
                self._counted.set(said)  # of the step: of each evaluation
            loss = closure()
            self._average_rest(optimizer)
            return self.rounds.mean_loss(loss, self._writer.scale) if searches else loss

        if len(args) > 1:
            return (args[0], averaged, *args[2:]), kwargs
        return args, {**kwargs, "closure": averaged}

    def before_other_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuses the step of an unwrapped optimizer whose gradients are not averaged, except in `no_sync`.

        Raises:
            ConfigError: the optimizer has such a gradient.
        """
        if not self._is_local and threading.get_ident() == self._thread:
            self._wrapped.check_unwrapped(optimizer, self.rounds.steps)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Notes that a step was made: the parameters now contain all exchanged gradients."""
        self.rounds.steps += 1
        self._states.not_finite.clear()
        self._states.own_not_finite.clear()
        for index in self._wrapped.indices_of(optimizer, self.rounds.steps):
            self._states.stepped(index)
        self._bridge.stepped()
        if not self._writer.is_open:  # open: a hook makes the step inside backward
            self.rounds.agreement.after_step(self.rounds.steps)

    def end(self) -> None:
        """Ends the training: see `GradientRounds.end`."""
        self.rounds.end()

    @property
    def is_open(self) -> bool:
        """Whether a backward is under way."""
        return self._writer.is_open

    def release(self) -> None:
        """Averages no more gradients."""
        for hook in self._hooks:
            hook.remove()

    def _average_rest(self, optimizer: torch.optim.Optimizer) -> None:
        if (
            self._writer.is_open
        ):  # a backward has failed and the others wait; or this step is made inside a backward
            self._end()
        wrapped, states, step = self._wrapped, self._states, self.rounds.steps
        own = wrapped.indices_of(optimizer, step)
        rest = [index for index in own if not states.is_averaged(index)]
        for index in () if len(self._bridge.roster.now) == 1 else rest:
            gradient = wrapped.parameters[index].grad
            assert gradient is not None
            is_computed = self._computed.has(index, gradient)
            if is_computed and self._computed.changed(index, gradient):
                raise ConfigError(
                    f"step {step}: the gradient of {wrapped.names[index]!r} from torch.autograd.grad was changed "
                    "(clipped, for example) before it was averaged over the workers, which is when the optimizer makes "
                    "its step. Use backward() instead, which averages at once: loss.backward(inputs=parameters)"
                )
            if not is_computed and states.changed_early(index):
                raise ConfigError(
                    f"step {step}: the gradient of {wrapped.names[index]!r} was changed (clipped, for example) before "
                    "it was averaged over the workers. Leave the last backward before the change out of no_sync: this "
                    "backward averages the gradients"
                )
        if rest:
            states.fired.update(rest)
            self._begin()
            self._end(by_hand=True)
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a GradScaler makes the optimizer skip the step itself
        for index in states.not_finite.intersection(own):
            gradient = wrapped.parameters[index].grad
            if gradient is not None and not torch.isfinite(gradient).all():
                whose = "this worker's" if index in states.own_not_finite else "another worker's"
                raise GradientError(
                    f"step {step}: {whose} gradient of {wrapped.names[index]!r} has a NaN or an infinity. "
                    "No worker has applied it. Lower the learning rate, scale the inputs, clip the gradient, "
                    "or use a GradScaler"
                )

    # ---- hooks --------------------------------------------------------------------------

    def _hook(self, index: int, parameter: nn.Parameter) -> None:
        def fired(_: torch.Tensor) -> None:
            if parameter.grad is None:
                return  # a hook of the script has used it in a step and removed it
            self._states.fired.add(index)
            self._computed.drop(index)
            if self._is_local:
                if self._end_of_backward() is None:
                    self._at_end_of_backward(self._counted.clear)
                    self._local.begin(self._counted.take_pass())
                self._states.accumulated(index)
                self._local.added(index)
                return
            self._local.averaging(index)
            if not self._writer.is_open:
                self._begin_in_backward()
            elif self._end_of_backward() is None:
                raise UserCodeError(
                    "the previous backward raised an error after this worker had sent a part of its gradient, so "
                    "this worker can no longer average gradients with the others: resume the run from its newest "
                    "checkpoint (gradstream resume)"
                )
            self._write(index)

        trained = parameter.requires_grad
        if parameter.is_floating_point():
            parameter.requires_grad_(True)  # torch wants that for a hook; it may be unfrozen at any time
            self._hooks += [
                parameter.register_hook(partial(self._gradient_computed, index)),  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(fired),  # type: ignore[no-untyped-call]
            ]
            parameter.requires_grad_(trained)

    def _gradient_computed(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """A hook of a parameter: sees its gradient before `p.grad` or the caller of `torch.autograd.grad` does."""
        if self._end_of_backward() is None:  # the first one of a backward decides for all
            self._is_repeat = self._counted.is_repeat()
        if self._is_repeat:
            gradient = gradient * 0 if gradient.requires_grad else torch.zeros_like(gradient)
        self._computed.note(index, gradient)
        return gradient

    def _begin_in_backward(self) -> None:
        self._at_end_of_backward(self._end)
        self._begin()

    def _at_end_of_backward(self, do: Callable[[], None]) -> None:
        def end() -> None:
            do()

        Variable._execution_engine.queue_callback(end)
        self._end_of_backward = weakref.ref(end)  # only backward holds it, until it ends or fails

    def _begin(self, *, silent: bool = False, samples: float | None = None) -> None:
        count, scale = whole(self._samples(self._local.take()) if samples is None else samples)
        self._writer.begin(self._bridge.open(count, silent=silent), scale)

    def _write(self, index: int) -> None:
        """Writes a gradient into its place, or zeros if there are no samples."""
        if index < len(self._bounds):
            gradient = self._wrapped.parameters[index].grad
            self._writer.write(index, gradient if self._bridge.round_samples else None)

    def _write_again(self, into: torch.Tensor) -> None:
        """Writes the gradients of the round into another vector: those of this worker, until the mean is there."""
        self._writer.begin(into, self._writer.scale)
        for index in range(len(self._bounds)):
            self._write(index)
        self._writer.finish()

    def _end(self, *, by_hand: bool = False) -> None:
        """Ends the round: writes the missing gradients, and replaces all by their means.

        Args:
            by_hand: the loop has written the gradients itself, without backward.
        """
        if not self._writer.is_open:
            return  # a step inside backward has ended the round
        for index in range(len(self._bounds)):
            if index not in self._writer:
                self._write(index)
        fired = self._round(self._writer.finish(), by_hand)
        self._counted.clear()
        self._states.fired.clear()
        late = [index for index in fired if index >= len(self._bounds)]
        if late:
            found = self.rounds.exchange_late(late, self._writer.scale)
            self._states.own_not_finite |= found.own_broken
            for index, mean in found.means.items():
                self._set_gradient(index, mean, index in found.broken)

    def _round(self, gradient: torch.Tensor, by_hand: bool) -> list[int]:
        """Exchanges a vector, and sets the gradients that have a place. Returns the indices that have fired."""
        parameters, states = self._wrapped.parameters, self._states
        present, own_broken = states.present(), self._writer.broken
        fired = states.fired & present  # the loop may have removed an accumulated gradient
        states.own_not_finite |= own_broken
        scale = self._writer.scale
        result = self.rounds.exchange(gradient, fired, own_broken, present, scale, self._write_again)
        if result is None:
            for index in fired:
                self._set_gradient(index, torch.zeros_like(parameters[index]), False)
            return []
        # Gradients that no backward has computed: those that the loop wrote are averaged by their optimizer's
        # step, those that it set to zero together with the others.
        again = {
            index
            for index in result.present.difference(result.fired)
            if (index in fired if by_hand else not states.is_averaged(index))
        }
        for index in fired.difference(result.fired):  # this worker has no samples: do as the other workers do
            parameters[index].grad = None
        for index in {*result.fired, *again}.intersection(range(len(self._bounds))):
            start, stop = self._bounds[index]
            mean = result.mean[start:stop]
            self._set_gradient(index, mean, index in result.broken, again=index in again)
        return list(result.fired)

    def _set_gradient(self, index: int, mean: torch.Tensor, broken: bool, *, again: bool = False) -> None:
        parameter = self._wrapped.parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        with torch.no_grad():
            if broken:
                self._states.not_finite.add(index)
                parameter.grad.fill_(torch.nan)
            else:
                parameter.grad.copy_(mean.view(parameter.shape))
        if parameter.grad.requires_grad and len(self._bridge.roster.now) > 1:
            hook = partial(self._differentiated, index)
            parameter.grad.register_hook(hook)  # type: ignore[no-untyped-call]
        self._states.set_averaged(index, again=again)
        self._computed.drop(index)

    def _differentiated(self, index: int, _: torch.Tensor) -> None:
        """Refuses to differentiate an averaged gradient: its graph covers only this worker's samples."""
        raise ConfigError(
            f"step {self.rounds.steps}: the gradient of {self._wrapped.names[index]!r} is differentiated after "
            "backward(create_graph=True). It is the mean over all workers, but its graph covers only this worker's "
            "samples, so workers would get different second derivatives. Take the first gradients with "
            "torch.autograd.grad(loss, parameters, create_graph=True), and call backward() on what you make of them "
            "(a penalty, or their product with a vector): backward averages what it computes"
        )
