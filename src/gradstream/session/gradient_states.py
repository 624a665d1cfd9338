"""Tracks which gradients are averaged over all workers and which are still this worker's own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gradstream.errors import ConfigError
from gradstream.session.samples import PassSamples


class WrappedParameters:
    """The parameters that a script has wrapped, and their optimizers.

    Args:
        names: names of all parameters: first those with a place in the gradient vector, in its order.
        parameters: the parameters, in the same order.
        optimizers: the wrapped optimizers.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.names = names
        self.parameters = parameters
        self.optimizers = optimizers
        self._indices = {id(parameter): index for index, parameter in enumerate(parameters)}

    def indices_of(self, optimizer: torch.optim.Optimizer, step: int) -> list[int]:
        """Positions in `parameters` of the parameters that an optimizer steps.

        Args:
            optimizer: one of `optimizers`.
            step: number of the loop's step, for the error message.

        Raises:
            ConfigError: the script has added a parameter to the optimizer after `wrap`, and it has a gradient.
        """
        indices = []
        for parameter in _parameters_of(optimizer):
            index = self._indices.get(id(parameter))
            if index is not None:
                indices.append(index)
            elif parameter.grad is not None:
                raise ConfigError(
                    f"step {step}: {type(optimizer).__name__} got a parameter of shape "
                    f"{tuple(parameter.shape)} after session.wrap, so its gradient is not averaged over the "
                    "workers: make it before wrap, and wrap its module or optimizer too"
                )
        return indices

    def check_unwrapped(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Refuses the step of an unwrapped optimizer whose gradients are not averaged.

        Raises:
            ConfigError: the optimizer has such a gradient.
        """
        if optimizer in self.optimizers:
            return
        for parameter in _parameters_of(optimizer):
            if parameter.grad is not None and id(parameter) not in self._indices:
                raise ConfigError(
                    f"step {step}: {type(optimizer).__name__}, which was not wrapped, has a parameter of "
                    f"shape {tuple(parameter.shape)} that no wrapped module or optimizer has, so its "
                    "gradient is not averaged over the workers: call session.wrap([model, ...], [optimizer, "
                    "...]) with all modules and optimizers; or, if each worker is to have a parameter of its "
                    "own, make the step inside session.no_sync()"
                )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class GradientStates:
    """Tracks for each parameter, by index, whether its gradient is averaged over all workers.

    An averaged gradient still counts as averaged after the loop clips or scales it, until an optimizer step has
    used it. A write after that step begins the next gradient.

    Args:
        parameters: the wrapped parameters.

    Attributes:
        fired: indices for which backward has computed a gradient since the last round.
        not_finite: indices whose averaged gradient is NaN, until the next step.
        own_not_finite: indices whose gradient on this worker has a NaN or an infinity, until the next step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.fired: set[int] = set()
        self.not_finite: set[int] = set()
        self.own_not_finite: set[int] = set()
        self._averaged: dict[int, weakref.ref[torch.Tensor]] = {}  # gradients that rounds have written
        self._fresh: set[int] = set()  # the averaged gradients that no step has used yet
        self._versions: dict[int, int] = {}  # of other gradients, after the last step or backward in no_sync
        self._accumulated: dict[int, weakref.ref[torch.Tensor]] = {}  # by the last backward in no_sync

    def present(self) -> set[int]:
        """Indices of the parameters that have a gradient."""
        return {index for index, parameter in enumerate(self._parameters) if parameter.grad is not None}

    def accumulated(self, index: int) -> None:
        """Notes that a backward in `no_sync` has added to this worker's own gradient."""
        gradient = self._parameters[index].grad
        assert gradient is not None
        self._versions[index], self._accumulated[index] = gradient._version, weakref.ref(gradient)

    def set_averaged(self, index: int, *, again: bool = False) -> None:
        """Notes that a round has written the parameter's gradient.

        Args:
            again: no backward has computed it since the last round. If a step has used the previous gradient, that
                step counts for this one too.
        """
        gradient = self._parameters[index].grad
        assert gradient is not None
        self._averaged[index] = weakref.ref(gradient)
        if again and index not in self._fresh:
            self._versions[index] = self._version(index)
        else:
            self._fresh.add(index)

    def stepped(self, index: int) -> None:
        """Notes that a step has used the gradient, and perhaps written into it."""
        self._fresh.discard(index)
        self._versions[index] = self._version(index)

    def is_averaged(self, index: int) -> bool:
        """Whether the gradient is averaged over all workers; True if there is no gradient."""
        if self._parameters[index].grad is None:
            return True
        if index in self.fired or not self._is_from_round(index):
            return False
        return index in self._fresh or self._version(index) == self._versions[index]

    def changed_early(self, index: int) -> bool:
        """Whether the loop has written into a gradient, or replaced it, after backward and before it was averaged."""
        if index not in self.fired:
            return False
        accumulated = self._accumulated.get(index)
        is_same = accumulated is not None and accumulated() is self._parameters[index].grad
        return not is_same or self._version(index) != self._versions.get(index)

    def _is_from_round(self, index: int) -> bool:
        averaged = self._averaged.get(index)
        return averaged is not None and averaged() is self._parameters[index].grad

    def _version(self, index: int) -> int:
        """The number of writes into the gradient, as torch counts them."""
        gradient = self._parameters[index].grad
        return -1 if gradient is None else gradient._version


class ComputedGradients:
    """The last gradient that `torch.autograd.grad` computed for each parameter, to detect changes by the loop.

    If the loop assigns it to `p.grad`, the optimizer's step averages it.
    """

    def __init__(self) -> None:
        self._computed: dict[int, tuple[StorageWeakRef, int]] = {}  # memory, and version when computed

    def note(self, index: int, gradient: torch.Tensor) -> None:
        """Notes a gradient that autograd has computed, in `torch.autograd.grad` or in backward."""
        if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
            memory = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
            self._computed[index] = memory, gradient._version

    def drop(self, index: int) -> None:
        """Forgets a gradient that backward has added to `p.grad`, or that is averaged by now."""
        self._computed.pop(index, None)

    def has(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether this gradient is the one that was computed: it has the same memory, detached or not."""
        if index not in self._computed or gradient.layout is not torch.strided:
            return False
        return bool(self._computed[index][0].cdata == gradient.untyped_storage()._cdata)

    def changed(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether such a gradient was written to after it was computed."""
        return gradient._version != self._computed[index][1]


class LocalPasses:
    """The backward passes in `no_sync` whose gradients still exist: their samples count in the next average.

    A loop may discard gradients by `zero_grad` or `p.grad = None`. A pass is dropped once no parameter's gradient
    contains any of it.

    Args:
        parameters: the wrapped parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._passes: list[
            tuple[PassSamples, set[int]]
        ] = []  # each pass with the parameters whose gradients contain it
        self._marks: dict[
            int, tuple[weakref.ref[torch.Tensor], int]
        ] = {}  # gradient and version after the last pass
        self._watched: set[int] = set()

    def begin(self, samples: PassSamples) -> None:
        """Notes a new pass."""
        self._passes = [pass_ for pass_ in self._passes if pass_[1]] + [(samples, set())]

    def added(self, index: int) -> None:
        """Notes that the pass has added to the gradient of a parameter."""
        self._passes[-1][1].add(index)
        self._mark(index)
        if index not in self._watched:
            self._watched.add(index)
            before = partial(self._check, index)  # called before backward adds to the gradient
            self._parameters[index].register_hook(before)  # type: ignore[no-untyped-call]

    def averaging(self, index: int) -> None:
        """Notes that an averaging pass, outside `no_sync`, has added to the gradient of a parameter."""
        if index in self._marks:
            self._mark(index)

    def take(self) -> list[PassSamples]:
        """Returns and forgets the passes in the gradients, which are averaged now."""
        for index in [*self._marks]:
            self._check(index)
        passes = [samples for samples, holders in self._passes if holders]
        self._passes, self._marks = [], {}
        return passes

    def _mark(self, index: int) -> None:
        gradient = self._parameters[index].grad
        assert gradient is not None
        self._marks[index] = weakref.ref(gradient), gradient._version

    def _check(self, index: int, _: object = None) -> None:
        if index in self._marks and self._is_lost(index):
            del self._marks[index]
            for _samples, holders in self._passes:
                holders.discard(index)

    def _is_lost(self, index: int) -> bool:
        """Whether the gradient was removed or zeroed. A gradient that was only changed still contains its passes."""
        gradient, (marked, version) = self._parameters[index].grad, self._marks[index]
        if gradient is None:
            return True
        if marked() is gradient and gradient._version == version:
            return False
        return gradient.layout is torch.strided and not gradient.any()
