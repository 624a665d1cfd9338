"""The update that a worker prepares for its next push."""

from __future__ import annotations

from collections.abc import Sequence

from gradstream.data.base import BatchRef
from gradstream.server.update import Update
from gradstream.worker.computed import ComputedGradient


class NextUpdate:
    """Counts the gradients that go into a worker's next update, and weighs them.

    A push is applied at one rate η, that of the first gradient in the sum. Each later gradient g_i has the weight
    η_i/η, where η_i is its own rate.

    Args:
        base: versions of the worker's parameters, by chunk.

    Attributes:
        update: the update, as far as it is known.
        lr: η.
        num_summed: number of gradients in the sum.
        refs: minibatches of all gradients, those without samples included.
    """

    def __init__(self, base: Sequence[int]) -> None:
        self.update = _empty(base)
        self.lr = 0.0
        self.num_summed = 0
        self.refs: list[BatchRef] = []

    def begins_with(self, gradient: ComputedGradient) -> bool:
        """Whether the sum begins with this gradient, whose rate is η then.

        A sum of gradients at a rate of 0 counts for nothing: the first gradient of another rate replaces it.
        """
        if self.num_summed and (self.lr or not gradient.lr):
            return False
        self.num_summed, self.lr = 0, gradient.lr
        return True

    def weight(self, gradient: ComputedGradient) -> float:
        """Weight of a later gradient in the sum."""
        return gradient.lr / self.lr if self.lr else 1.0

    def count(self, gradient: ComputedGradient, loss: float, *, summed: bool = False) -> None:
        """Notes that a gradient goes into the update.

        Args:
            gradient: the gradient.
            loss: mean loss over its samples.
            summed: it was added to the sum.
        """
        update, new = self.update, gradient.samples
        if new:
            share = new / (update.samples + new)
            update.loss = loss if share == 1.0 else update.loss + share * (loss - update.loss)
        self.num_summed += summed
        update.samples += new
        update.num_gradients += bool(new)
        update.lr = self.lr if self.num_summed else gradient.lr
        self.refs.append(gradient.batch.ref)

    def take(self, base: Sequence[int]) -> Update:
        """The update, complete but for `on_done`. Another one begins, on parameters of these versions."""
        update, self.update = self.update, _empty(base)
        update.refs, self.refs = tuple(self.refs), []
        self.num_summed = 0
        return update


def _empty(base: Sequence[int]) -> Update:
    return Update(None, 0, 0.0, base, num_gradients=0)
