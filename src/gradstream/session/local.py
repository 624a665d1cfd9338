"""A loop with local steps between two exchanges: under local SGD, gossip, push-sum and NoLoCo.

    worker's thread                            user's thread
    turn(w) ── w_i ← w ──▶                     H times: forward, backward, optimizer.step(), all on w_i
             ◀── w - w_i in a group ──         the H-th step() waits
                 w_i in pairs
    … exchange, the next w …
    turn(w) ── w_i ← w ──▶                     step() returns

The script's own optimizer makes the steps or, for arrays, the script's update rule. The script may also change w_i
between two steps: like a step, the change is part of w - w_i. A round ends after H steps of the loop; a loop with
several optimizers steps each once per step of the loop. Closing the session exchanges what is left.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.autograd import Variable

from gradstream.checkpoint.own_state import FIRST
from gradstream.model.base import Slot
from gradstream.model.buffers import Arrays, Buffers, Tree, rebuild
from gradstream.optim.base import Optimizer
from gradstream.session.arrays import ArrayBinding, LocalUpdates, check_rule
from gradstream.session.binding import ModuleBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.replica import OptimizerStates
from gradstream.session.samples import SampleCount


class LocalModule(ModuleBinding):
    """Makes the parameters of a module views of this worker's own vector w_i.

    Args:
        module, parameters: as for `ModuleBinding`.
        in_pairs: a round submits w_i itself; else w - w_i.
        counted: tells whether the pass that is made now repeats samples of another one. Its gradient is set to zero.
        states: those of the optimizers.
        is_first: workers begin with their scripts' own parameters, which are made equal; else they are equal.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        in_pairs: bool,
        counted: SampleCount,
        states: OptimizerStates,
        is_first: bool = True,
    ) -> None:
        super().__init__(module, parameters)
        self._in_pairs = in_pairs
        self._states = states
        self._is_first = is_first
        self._begun = self._own = torch.empty(0)  # w and w_i

        self._end_of_backward: Callable[[], Callable[[], None] | None] = lambda: None
        self._is_repeat = False

        def without_repeats(own: torch.Tensor) -> torch.Tensor:
            if self._end_of_backward() is None:  # the first one of a backward decides for all
                self._is_repeat = counted.is_repeat()

                def end() -> None:
                    counted.pass_is_over()

                Variable._execution_engine.queue_callback(end)
                self._end_of_backward = weakref.ref(end)  # only backward holds it, until it ends or fails
            if not self._is_repeat:
                return own
            return own * 0 if own.requires_grad else torch.zeros_like(own)  # the first keeps the graph

        for parameter in parameters:
            parameter.register_hook(without_repeats)  # type: ignore[no-untyped-call]

    def check_unchanged(self, where: str) -> None:
        """Checks that the module still has its parameters; their values may change."""
        self.watch.check_module(where)

    @property
    def changed(self) -> bool:
        """Whether w_i differs from w."""
        pairs = zip(self._parameters, self.layout.views(self._begun), strict=True) if len(self._begun) else ()
        return any(not torch.equal(parameter.detach(), was) for parameter, (_, was) in pairs)

    def set_parameters(self, parameters: torch.Tensor) -> None:
        """See `ParameterBinding.set_parameters`: w_i ← w."""
        if len(self._own) != len(parameters):
            self._own = torch.empty_like(parameters)
        self._begun = parameters
        self._own.copy_(parameters)
        self._point_at(self._own)

    def copy_gradient(self, gradient: torch.Tensor) -> None:
        """Writes w - w_i, or w_i."""
        for parameter, (_, was), (_, into) in zip(
            self._parameters, self.layout.views(self._begun), self.layout.views(gradient), strict=True
        ):
            own = parameter.detach()
            into.copy_(own) if self._in_pairs else torch.sub(was, own, out=into)

    def extra(self) -> Arrays:
        """The script's initial parameters, until training begins: all workers begin with worker 0's."""
        if not self._is_first:
            return {**super().extra()}
        tensors = [parameter.detach() for parameter in self._parameters]
        return {**super().extra(), **first_of(self.layout.slots, tensors, len(self._begun))}

    def load_fixed(self, frozen: Buffers) -> None:
        """See `ParameterBinding.load_fixed`, and what `extra` returns; after a phase of joint steps, optimizers too."""
        super().load_fixed(frozen)
        self._states.load(frozen)
        for parameter, slot in zip(self._parameters, self.layout.slots, strict=True):
            if (value := frozen.get(FIRST + slot.name)) is not None:
                parameter.data.copy_(torch.from_numpy(np.asarray(value)))

    @contextmanager
    def showing(self, parameters: torch.Tensor, own: torch.Tensor | None) -> Iterator[None]:
        """See `ParameterBinding.showing`. In pairs nobody has the common mean, so the script keeps seeing w_i."""
        if self._in_pairs:
            yield
            return
        local = [
            parameter.data for parameter in self._parameters
        ]  # the script may have moved them to other memory
        self._point_at(parameters.clone())
        try:
            yield
        finally:
            for parameter, data in zip(self._parameters, local, strict=True):
                parameter.data = data


class LocalArrays(ArrayBinding):
    """A loop's arrays, which are w_i themselves, and the update rule for its steps.

    Args:
        arrays: as for `ArrayBinding`.
        rule: the update rule of the first step.
        in_pairs: see `LocalModule`.
        is_repeat: whether the step that is made now repeats samples of another one.

    Attributes:
        updates: makes the steps.
    """

    def __init__(
        self, arrays: Tree, rule: Optimizer, *, in_pairs: bool, is_repeat: Callable[[], bool]
    ) -> None:
        super().__init__(arrays)
        self._rule = rule
        self._in_pairs = in_pairs
        self._is_repeat = is_repeat
        self.updates = LocalUpdates()

    def check_unchanged(self, where: str) -> None:
        """Does nothing: changes by the script are part of w - w_i."""

    @property
    def changed(self) -> bool:
        """Whether w_i differs from w."""
        views = self.layout.views(self._shown) if len(self._shown) else ()
        return any(not np.array_equal(view.numpy(), self.by_name[name]) for name, view in views)

    def step(self, parameters: Tree, gradients: Tree, rule: Optimizer) -> None:
        """Makes one step on this worker alone.

        Raises:
            ConfigError: the arrays or the rule are not those of the first step, or the rule's rate is not a number.
            GradientError: the gradients do not fit.
        """
        check_rule(rule, self._rule)
        self.check(parameters)
        if self._is_repeat():
            gradients = rebuild(parameters, lambda name: np.zeros_like(self.by_name[name]))
        self.updates.step(parameters, gradients, rule)

    def copy_gradient(self, gradient: torch.Tensor) -> None:
        """Writes w - w_i, or w_i."""
        self.init(0, gradient)
        if not self._in_pairs:
            torch.sub(self._shown, gradient, out=gradient)

    def extra(self) -> Arrays:
        """As of `LocalModule`."""
        made = [torch.from_numpy(self.by_name[slot.name]) for slot in self.layout.slots]
        return {**super().extra(), **first_of(self.layout.slots, made, len(self._shown))}

    def load_fixed(self, frozen: Buffers) -> None:
        """Sets what `extra` returns."""
        super().load_fixed(frozen)
        for name, array in self.by_name.items():
            if (value := frozen.get(FIRST + name)) is not None:
                array[...] = value

    @contextmanager
    def showing(self, parameters: torch.Tensor, own: torch.Tensor | None) -> Iterator[None]:
        """As of `LocalModule`."""
        if self._in_pairs:
            yield
            return
        local = {name: array.copy() for name, array in self.by_name.items()}
        for name, view in self.layout.views(parameters):
            self.by_name[name][...] = view.numpy()
        try:
            yield
        finally:
            for name, array in local.items():
                self.by_name[name][...] = array


def first_of(slots: Sequence[Slot], tensors: Sequence[torch.Tensor], begun: int) -> Arrays:
    """The initial parameters under their names with the prefix; {} once training has begun."""
    if begun:
        return {}
    return {FIRST + slot.name: tensor.numpy().copy() for slot, tensor in zip(slots, tensors, strict=True)}


class LocalRound:
    """Counts the steps of a round, and submits the round when it is full.

    With several optimizers, a round ends when all have made the same number of steps. If some make fewer, the round
    ends when the loop calls a model for its next step.

    Args:
        bridge: receives the round.
        steps: H, steps of a round.
        binding: the parameters of the loop.
        optimizers: number of the script's optimizers.
        is_new: this worker has come to a run that had begun. Its first round ends with its first step, since the others
            wait for it.
    """

    def __init__(
        self,
        bridge: LoopBridge,
        steps: int,
        binding: LocalModule | LocalArrays,
        optimizers: int = 1,
        *,
        is_new: bool = False,
    ) -> None:
        self._bridge = bridge
        self._steps_a_round = steps
        self._full = 1 if is_new else steps  # of this round
        self._binding = binding
        self._optimizers = optimizers
        self._made: dict[int, int] = {}  # steps of each optimizer in the whole run
        self._begun = 0  # steps of the loop before this round
        self._samples, self._loss = 0, 0.0
        self._last = 1  # samples of the last step

    @property
    def _steps(self) -> int:
        """Steps of the loop so far: the most that any optimizer has made."""
        return max(self._made.values(), default=0)

    @property
    def _is_full(self) -> bool:
        return self._steps - self._begun >= self._full

    def is_further(self, optimizer: object) -> bool:
        """Whether the next step of an optimizer belongs to a step of the loop that another one has made already."""
        return self._made.get(id(optimizer), 0) < self._steps

    def stepped(self, samples: int, loss: float, optimizer: object = None) -> None:
        """Counts a step, and waits for the exchange if it was the last of its round.

        Args:
            samples: number of samples in its gradient.
            loss: mean loss over them, NaN if unknown.
            optimizer: the script's optimizer that made it.

        Raises:
            ClosedError, GradstreamError: see `LoopBridge.step`.
        """
        before, key = self._steps, id(optimizer)
        self._made[key] = self._made.get(key, 0) + 1
        if self._steps > before:  # else it belongs to a step of the loop that has been counted
            self._bridge.stepped(handed=False)
            self._samples += samples
            self._loss += samples * loss if samples else 0.0
            self._last = samples or self._last
        alike = len(self._made) == self._optimizers and len(set(self._made.values())) == 1
        if self._is_full and alike:
            self._hand_over()

    def called(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Submits a full round: a model's next forward begins, so no other optimizer will make a step."""
        if self._is_full and module.training and torch.is_grad_enabled():
            self._hand_over()

    def end(self) -> None:
        """Submits what is left when the loop ends: steps, and changes by the script since the last round.

        A change without a step weighs as much as the last step.
        """
        if self._steps > self._begun or self._binding.changed:
            if self._steps == self._begun:
                self._samples = self._last
            self._hand_over()

    def _hand_over(self) -> None:
        samples, loss = self._samples, self._loss / self._samples if self._samples else math.nan
        self._begun, self._samples, self._loss, self._full = self._steps, 0, 0.0, self._steps_a_round
        self._bridge.step(samples, 1.0, loss)
