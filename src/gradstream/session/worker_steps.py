"""Steps that an optimizer makes on the worker: what is handed over is how far each has gone."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradstream.session.binding import ModuleBinding
from gradstream.session.rules import STEPS

__all__ = ["BoundSteps", "Step", "WorkerSteps", "loss_of"]

Step = Callable[[float, float], None]
"""Hands a step over, with its learning rate and its loss, and waits for the parameters of the next one."""


class BoundSteps(ModuleBinding):
    """As `ModuleBinding`, where the user's optimizer makes the steps: how far each has gone is handed over.

    As the gradient of SGD at a rate of 1 that is the step itself, to the rounding of w - (w - w').
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(module, parameters)
        self._shown = self._before = torch.empty(0)

    def begin(self) -> None:
        """The optimizer's step comes next. From the user's thread."""
        if len(self._before) != len(self._shown):
            self._before = torch.empty_like(self._shown)
        self._before.copy_(self._shown)

    def show(self, parameters: torch.Tensor) -> None:
        """See `Held.show`."""
        super().show(parameters)
        self._shown = parameters

    def take(self, gradient: torch.Tensor) -> None:
        """See `Held.take`: before - after. What was shown is what it was before."""
        before = self.layout.views(self._before)
        for parameter, (_, was), (_, view) in zip(
            self._parameters, before, self.layout.views(gradient), strict=True
        ):
            torch.sub(was, parameter.detach(), out=view)
        self._shown.copy_(self._before)  # whoever computed the step, it is the worker that makes it


class WorkerSteps:
    """Has every step of an optimizer handed over. It stays the user's own, with torch's state and hooks.

    Its `step` does what it did, closures, hooks and skipped parameters included, and only then is it made
    known how far that has gone. So it may be any optimizer, and may change its options and forget or load
    its state as it likes. Checkpoints of the run do not have that state: a script that is to be resumed saves
    and loads it itself.

    Args:
        inner: the user's optimizer; its `step` is replaced.
        held: the parameters.
        step: called with the learning rate, 1, and the loss, NaN where unknown.
        where: names worker and step, for messages.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, held: BoundSteps, step: Step, where: Callable[[], str]
    ) -> None:
        self.inner = inner
        made = inner.step

        @functools.wraps(made)  # with the mark of a scheduler that was there first
        def stepped(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            at = where()
            held.unchanged(at)
            held.begin()
            found = made(*args, **kwargs)
            held.watch.check_groups(at, inner.param_groups)
            step(STEPS.lr, loss_of(found))  # type: ignore[arg-type]  # a schedule it is not
            return found

        inner.step = types.MethodType(stepped, inner)  # type: ignore[method-assign]

    def passed(self) -> None:
        """See `DistributedOptimizer.passed`."""
        self.inner._opt_called = True  # type: ignore[attr-defined]


def loss_of(found: Any) -> float:
    """A loss, of whatever a step may return."""
    try:
        return float(found.detach() if isinstance(found, torch.Tensor) else found)
    except (TypeError, ValueError, RuntimeError):
        return math.nan
