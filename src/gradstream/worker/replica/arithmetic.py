"""Arithmetic over a worker's whole vectors, in blocks that stay in the processor's cache.

One operation after the other over whole vectors would move each of them through memory again: at 74.77 M
elements a step is bound by that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gradstream.worker.replica.updater import Factors

__all__ = ["ElasticPull", "LocalStep", "add_scaled"]

BLOCK_ELEMS = 1 << 17  # of four float32 vectors: 2 MiB


def _blocks(factors: Factors) -> Iterator[tuple[slice, float]]:
    """The ranges in blocks, with their factors. Vector registers see the same elements as uncut."""
    for start, stop, factor in factors:
        for first in range(start, stop, BLOCK_ELEMS):
            yield slice(first, min(first + BLOCK_ELEMS, stop)), factor


def add_scaled(target: torch.Tensor, source: torch.Tensor, factors: Factors, scale: float = 1.0) -> None:
    """Adds scale·factor·source to the target, in place; each range has its own factor."""
    for block, factor in _blocks(factors):
        target[block].add_(source[block], alpha=scale * factor)


@dataclass(frozen=True, slots=True)
class LocalStep:
    """v ← momentum·v + g;  acc ← acc + weight·v;  w ← w - lr·scale·v.  Without a velocity v is g.

    Args:
        lr: α.
        scales: factor of α for each range of the vector.
        momentum: of v, 0 to 1.
        weight: of v in the sum.
        second: the step before was the first of its period: acc ← v, as that left it, before all else.
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
        """All of one shape, (elems,); changes all but the gradient."""
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
    """d = share·(x - y);  x ← x - d, of this very d: what x loses is what y is to gain.

    Args:
        share: α.
    """

    share: float

    def __call__(self, parameters: torch.Tensor, fetched: torch.Tensor) -> None:
        """Both (elems,): x, and y, which d takes the place of."""
        for block, _ in _blocks([(0, len(parameters), 1.0)]):
            own, difference = parameters[block], fetched[block]
            torch.sub(own, difference, out=difference).mul_(self.share)
            own.sub_(difference)
