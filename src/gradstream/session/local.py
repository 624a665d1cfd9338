"""A loop that trains alone between two exchanges: under local SGD, gossip, push-sum and NoLoCo.

    worker's thread                            user's thread
    turn(w) ── w_i ← w ──▶                     H times: forward, backward, optimizer.step(), all on w_i
             ◀── w - w_i in a group ──         the H-th step() waits
                 w_i in pairs
    … exchange, the next w …
    turn(w) ── w_i ← w ──▶                     step() returns

The script's own optimizer makes the steps, whatever it is; for arrays, the rule that the script gives. The script may
change w_i between two steps: what it does is in w - w_i, as a step is. A round is over when one of the optimizers has
made H steps. What is left of a round when the session is closed is exchanged then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from gradstream.model.buffers import Tree
from gradstream.optim.base import Optimizer
from gradstream.session.arrays import ArrayBinding, LocalUpdates
from gradstream.session.binding import ModuleBinding
from gradstream.session.bridge import LoopBridge


class LocalModule(ModuleBinding):
    """Makes the parameters of a module views of this worker's own vector w_i.

    Args:
        module, parameters: as for `ModuleBinding`.
        in_pairs: a round hands over w_i itself; else w - w_i.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], *, in_pairs: bool) -> None:
        super().__init__(module, parameters)
        self._in_pairs = in_pairs
        self._begun = self._own = torch.empty(0)  # w and w_i

    def check_unchanged(self, where: str) -> None:
        """See `ParameterBinding.check_unchanged`: values may change, but the module has to keep its parameters."""
        self.watch.check_module(where)

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

    @contextmanager
    def showing(self, parameters: torch.Tensor, own: torch.Tensor | None) -> Iterator[None]:
        """See `ParameterBinding.showing`. In pairs nobody has the mean of all: the script goes on seeing w_i."""
        if self._in_pairs:
            yield
            return
        self._point_at(parameters.clone())
        try:
            yield
        finally:
            self._point_at(self._own)


class LocalArrays(ArrayBinding):
    """A loop's arrays, which are w_i themselves, and the rule that makes its steps.

    Args:
        arrays: as for `ArrayBinding`.
        in_pairs: see `LocalModule`.
    """

    def __init__(self, arrays: Tree, *, in_pairs: bool) -> None:
        super().__init__(arrays)
        self._in_pairs = in_pairs
        self._updates = LocalUpdates()

    def check_unchanged(self, where: str) -> None:
        """Does nothing: what the script changes is in w - w_i."""

    def step(self, parameters: Tree, gradients: Tree, rule: Optimizer) -> None:
        """Makes one step on this worker alone.

        Raises:
            ConfigError: the arrays are not those of the first step, or the rule's rate is no number.
            GradientError: the gradients do not fit.
        """
        self.check(parameters)
        self._updates.step(parameters, gradients, rule)

    def copy_gradient(self, gradient: torch.Tensor) -> None:
        """Writes w - w_i, or w_i."""
        self.init(0, gradient)
        if not self._in_pairs:
            torch.sub(self._shown, gradient, out=gradient)


class LocalRound:
    """Counts the steps of a round, and hands the round over when it is full.

    Args:
        bridge: takes the round.
        steps: H, steps of a round.
    """

    def __init__(self, bridge: LoopBridge, steps: int) -> None:
        self._bridge = bridge
        self._full = steps
        self._made: dict[int, int] = {}  # by optimizer
        self._samples, self._loss = 0, 0.0

    def stepped(self, samples: int, loss: float, optimizer: object = None) -> None:
        """Counts a step that was made, and waits for the exchange where it was the last one of its round.

        Args:
            samples: samples behind its gradient.
            loss: mean loss over them, NaN where unknown.
            optimizer: which of the script's optimizers has made it.

        Raises:
            ClosedError, GradstreamError: see `LoopBridge.step`.
        """
        made = self._made[id(optimizer)] = self._made.get(id(optimizer), 0) + 1
        others = (count for key, count in self._made.items() if key != id(optimizer))
        if made > max(others, default=0):  # else it belongs to a step of the loop that has been counted
            self._bridge.stepped(handed=False)
            self._samples += samples
            self._loss += samples * loss if samples else 0.0
        if made == self._full:
            self.end()

    def end(self) -> None:
        """Hands over what there is of the round. Does nothing if that is nothing."""
        if not self._made:
            return
        samples, loss = self._samples, self._loss / self._samples if self._samples else math.nan
        self._made, self._samples, self._loss = {}, 0, 0.0
        self._bridge.step(samples, 1.0, loss)
