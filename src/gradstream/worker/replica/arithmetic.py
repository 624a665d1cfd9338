"""Arithmetic over a worker's whole vectors, in blocks that stay in the processor's cache.

Without blocks, each of several operations in a row would move the whole vectors through memory again: with 74.77 M
elements, that bounds the time of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gradstream.worker.replica.updater import Factors

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
