"""numpy arrays whose update a loop asks for: alone, and of the joint gradient of all workers."""

from __future__ import annotations

import math

import torch

from gradstream.errors import ConfigError, GradientError
from gradstream.model.check import finite
from gradstream.model.tree import Tree
from gradstream.optim.base import Optimizer
from gradstream.session.binding import ArrayBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.joint import JointArrays, JointVector

__all__ = ["ArrayLoop", "LoneArrays", "rate_of"]


class LoneArrays:
    """Update rules on numpy arrays, without anybody else.

    Attributes:
        state: vectors of the update rule, by name; filled at the first step.
        counts: "steps", how many there were.
    """

    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}
        self.counts = {"steps": 0}

    def step(self, parameters: Tree, gradients: Tree, rule: Optimizer) -> Tree:
        """One step, in place. Returns the parameters."""
        held = ArrayBinding(parameters)
        held.give(gradients)
        flat, gradient = (torch.empty(held.layout.elems, dtype=held.layout.dtype) for _ in range(2))
        held.init(0, flat)
        held.take(gradient)
        self.update(flat, gradient, rule)
        held.show(flat)
        return parameters

    def update(self, flat: torch.Tensor, gradient: torch.Tensor, rule: Optimizer) -> None:
        """One step of a flat vector (n,), in place."""
        if not self.state:
            self.state.update({name: torch.full_like(flat, rule.state_init) for name in rule.state_names})
        self.counts["steps"] += 1
        rule.apply(flat, gradient, self.state, lr=rate_of(rule), step=self.counts["steps"])


class ArrayLoop:
    """A loop's arrays, which every worker moves itself by the joint gradient of all.

    Args:
        parameters: as of `Session.exchange`.

    Raises:
        ConfigError: as `ArrayBinding`.
    """

    def __init__(self, parameters: Tree) -> None:
        self._arrays = ArrayBinding(parameters)
        self._alone = LoneArrays()
        layout = self._arrays.layout
        shapes = {slot.name: slot.shape for slot in layout.slots}
        self._vector = JointVector(shapes, 1, layout.dtype)
        self.held = JointArrays(self._arrays.by_name, self._vector, self._alone.state, self._alone.counts)

    def hello(self, handover: LoopBridge) -> None:
        """A round without a gradient: returns when all workers are there."""
        vector = handover.open(1, silent=True).zero_()
        self._vector.finish(vector, [[0.0], [0.0], [0.0]], [0, 0, 0, 0])
        handover.exchange(math.nan)

    def step(
        self, handover: LoopBridge, parameters: Tree, gradients: Tree, rule: Optimizer, samples: int
    ) -> Tree:
        """One step of all workers. Returns the parameters.

        Raises:
            ConfigError: other arrays than those given first.
            GradientError: gradients that do not fit, or are not finite, on this worker or another.
        """
        arrays, room = self._arrays, self._vector.room
        arrays.check(parameters)
        arrays.give(gradients)
        vector = handover.open(samples)
        arrays.take(vector[:room])
        broken = not finite(vector[:room])
        if broken:
            vector.zero_()
        checks = [self._alone.counts["steps"], 0, 0, 0]
        self._vector.finish(vector, [[1.0], [float(broken)], [1.0]], checks)
        mean = handover.exchange(math.nan)
        if self._vector.broken(mean):
            raise GradientError(
                f"step {checks[0]}: {'this' if broken else 'another'} worker's gradient has a NaN or an "
                "infinity: lower the learning rate, scale the inputs, or clip it. Nothing was applied"
            )
        flat = torch.empty(room, dtype=mean.dtype)
        arrays.init(0, flat)
        self._alone.update(flat, mean[:room], rule)
        arrays.show(flat)
        handover.stepped()
        return parameters


def rate_of(rule: Optimizer) -> float:
    """The learning rate of a step.

    Raises:
        ConfigError: it is a schedule.
    """
    if callable(rule.lr):
        raise ConfigError(
            f"exchange: lr is {rule.lr!r}: a loop of your own gives the rate of each step itself"
        )
    return rule.lr
