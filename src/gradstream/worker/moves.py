"""Arithmetic over a worker's whole vectors, in blocks that stay in the processor's cache.

One operation after the other over whole vectors would move each of them through memory again: at 74.77 M
elements a step is bound by that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["ElasticPull", "LocalStep"]

BLOCK_ELEMS = 1 << 17  # of four float32 vectors: 2 MiB


def _blocks(elems: int) -> Iterator[slice]:
    """Vector registers see the same elements as uncut."""
    return (slice(start, start + BLOCK_ELEMS) for start in range(0, elems, BLOCK_ELEMS))


@dataclass(frozen=True, slots=True)
class LocalStep:
    """v ← momentum·v + g;  acc ← acc + v;  w ← w - lr·v.  Without a velocity v is g.

    Args:
        lr: α.
        momentum: of v, 0 to 1.
        second: the step before was the first of its period: acc ← v, as that left it, before all else.
    """

    lr: float
    momentum: float = 0.0
    second: bool = False

    def __call__(
        self,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        accumulated: torch.Tensor | None,
        velocity: torch.Tensor | None,
    ) -> None:
        """All of one shape, (elems,); changes all but the gradient."""
        for block in _blocks(len(gradient)):
            direction = gradient[block]
            if velocity is not None:
                if accumulated is not None and self.second:
                    accumulated[block].copy_(velocity[block])
                direction = velocity[block].mul_(self.momentum).add_(direction)
            if accumulated is not None:
                accumulated[block].add_(direction)
            parameters[block].add_(direction, alpha=-self.lr)


@dataclass(frozen=True, slots=True)
class ElasticPull:
    """d = share·(x - y);  x ← x - d, of this very d: what x loses is what y is to gain.

    Args:
        share: α.
    """

    share: float

    def __call__(self, parameters: torch.Tensor, fetched: torch.Tensor) -> None:
        """Both (elems,): x, and y, which d takes the place of."""
        for block in _blocks(len(parameters)):
            own, difference = parameters[block], fetched[block]
            torch.sub(own, difference, out=difference).mul_(self.share)
            own.sub_(difference)
