"""Which gradients are joint, the mean over all workers' samples, and which are this worker's own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["Joined"]


class Joined:
    """Keeps account of them, by the number of the parameter.

    A joint gradient stays one whatever a loop does to it (clipping, scaling), until a step was made of it. A
    loop that writes into it from then on makes the next gradient in its place.

    Args:
        parameters: whose gradients.

    Attributes:
        fired: those that got a gradient since the last round.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.fired: set[int] = set()
        self._given: dict[int, weakref.ref[torch.Tensor]] = {}  # by rounds
        self._fresh: set[int] = set()  # of these, those of which no step was made yet
        self._versions: dict[int, int] = {}  # of the others, as a step or no_sync's backward has left them

    def summed(self, index: int) -> None:
        """A backward has added to this worker's own gradient, which stays its own for now."""
        self._versions[index] = self._version(index)

    def given(self, index: int, *, again: bool = False) -> None:
        """A round has given the parameter the gradient that it has now.

        Args:
            again: no backward has made it. If a step was made of what was there before, it was of this too.
        """
        gradient = self._parameters[index].grad
        assert gradient is not None
        self._given[index] = weakref.ref(gradient)
        if again and index not in self._fresh:
            self._versions[index] = self._version(index)
        else:
            self._fresh.add(index)

    def stepped(self, index: int) -> None:
        """A step was made of it. Some optimizers write into gradients."""
        self._fresh.discard(index)
        self._versions[index] = self._version(index)

    def is_joint(self, index: int) -> bool:
        """Whether it is none, or joint."""
        if self._parameters[index].grad is None:
            return True
        if index in self.fired or not self._is_given(index):
            return False
        return index in self._fresh or self._version(index) == self._versions[index]

    def changed_early(self, index: int) -> bool:
        """Whether the loop has changed a gradient since backward, which was not joint yet."""
        return index in self.fired and self._version(index) != self._versions.get(index)

    def _is_given(self, index: int) -> bool:
        given = self._given.get(index)
        return given is not None and given() is self._parameters[index].grad

    def _version(self, index: int) -> int:
        """Goes up whenever somebody writes into it."""
        gradient = self._parameters[index].grad
        return -1 if gradient is None else gradient._version
