"""The update that a worker prepares for its next push."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gradstream.data.base import BatchRef
from gradstream.server.client.push import Update
from gradstream.worker.computed import ComputedGradient
from gradstream.worker.updater import Factors

# ---- next update -------------------------------------------------------------------------


class NextUpdate:
    """Counts the gradients that go into a worker's next update, and weighs them.

    A push is applied at one rate η, that of the first gradient in the sum. Each later gradient g_i has the weight
    η_i/η, where η_i is its own rate.

    Args:
        base: versions of the worker's parameters, by chunk.

    Attributes:
        update: the update so far.
        lr: η.
        num_summed: number of gradients in the sum.
        refs: minibatches (also those without samples) that are not in updates of every chunk.
    """

    def __init__(self, base: Sequence[int]) -> None:
        self.update = _empty(base)
        self.lr = 0.0
        self.num_summed = 0
        self.refs: list[BatchRef] = []
        self._counted = 0  # minibatches so far
        self._taken = [0] * len(base)  # by chunk, the same at its last update

    def begins_with(self, gradient: ComputedGradient) -> bool:
        """Whether the sum begins with this gradient, whose rate then becomes η.

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
        self._counted += 1

    def take(self, base: Sequence[int], chunks: Sequence[int] | None = None) -> Update:
        """The update, complete but for `on_done`. Another one begins, on parameters of these versions.

        It has the minibatches that are in an update of every chunk with this one.

        Args:
            base: versions of the worker's parameters, by chunk.
            chunks: the chunks that are updated; None for all.
        """
        update, self.update = self.update, _empty(base)
        for chunk in range(len(self._taken)) if chunks is None else chunks:
            self._taken[chunk] = self._counted
        whole = len(self.refs) - (self._counted - min(self._taken, default=self._counted))
        update.refs, self.refs, update.chunks = tuple(self.refs[:whole]), self.refs[whole:], chunks
        self.num_summed = 0
        return update


def _empty(base: Sequence[int]) -> Update:
    return Update(None, 0, 0.0, base, num_gradients=0)


# ---- arithmetic --------------------------------------------------------------------------
# Arithmetic over a worker's whole vectors, in blocks that stay in the processor's cache.
#
# Without blocks, each of several operations in a row would move the whole vectors through memory again: with 74.77 M
# elements, that bounds the time of a step.

BLOCK_ELEMS = 1 << 17  # of four float32 vectors: 2 MiB


def _blocks(factors: Factors) -> Iterator[tuple[slice, float]]:
    """The ranges in blocks, with their factors. Results have the same bits as without blocks."""
    for start, stop, factor in factors:
        for first in range(start, stop, BLOCK_ELEMS):
            yield slice(first, min(first + BLOCK_ELEMS, stop)), factor


def add_scaled(target: torch.Tensor, source: torch.Tensor, factors: Factors, scale: float = 1.0) -> None:
    """Adds scale·factor·source to the target, in place, with the factor of each range."""
    for block, factor in _blocks(factors):
        target[block].add_(source[block], alpha=scale * factor)


@dataclass(frozen=True, slots=True)
class LocalStep:
    """v ← momentum·v + g;  acc ← acc + weight·v;  w ← w - lr·scale·v.  Without a velocity, v is g.

    Args:
        lr: learning rate, α.
        scales: factor of α for each range of the vector.
        momentum: factor of the previous velocity, 0 to 1.
        weight: weight of v in the sum.
        second: this is the second step of its period: acc ← v first, since the first step left its sum in v.
    """

    lr: float
    scales: Factors
    momentum: float = 0.0
    weight: float = 1.0
    second: bool = False

    def __call__(
        self,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        accumulated: torch.Tensor | None,
        velocity: torch.Tensor | None,
    ) -> None:
        """Makes the step. All vectors are (elems,); all but the gradient are changed."""
        for block, scale in _blocks(self.scales):
            direction = gradient[block]
            if velocity is not None:
                if accumulated is not None and self.second:
                    accumulated[block].copy_(velocity[block])
                direction = velocity[block].mul_(self.momentum).add_(direction)
            if accumulated is not None:
                accumulated[block].add_(direction, alpha=self.weight)
            parameters[block].add_(direction, alpha=-self.lr * scale)


@dataclass(frozen=True, slots=True)
class ElasticPull:
    """The elastic step of a worker: d = share·(x - y); x ← x - d. The server adds the same d to its y.

    Args:
        share: α, 0 to 1.
    """

    share: float

    def __call__(self, parameters: torch.Tensor, fetched: torch.Tensor) -> None:
        """Makes the step on x and y, both (elems,). d takes the place of y."""
        for block, _ in _blocks([(0, len(parameters), 1.0)]):
            own, difference = parameters[block], fetched[block]
            torch.sub(own, difference, out=difference).mul_(self.share)
            own.sub_(difference)
