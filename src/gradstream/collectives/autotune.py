"""Which algorithm for how many bytes: the cheapest by the cost formulas, with figures that were measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradstream.collectives.algorithms import ALGORITHMS, PARTS

__all__ = ["TIE", "Choice", "MeasuredCosts"]

LARGEST_BYTES = 1 << 40

RING = "ring"
TIE = 0.02
"""A ring's ranks talk to two neighbours alone, and hide the latency of all steps but the first behind pieces
that are on their way: for long vectors it is the fastest of those that the formulas hardly tell apart."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What messages and sums cost among the ranks of a group.

    Args:
        alpha_s: a message, however short, from one rank to the next.
        beta_s_byte: a byte more.
        gamma_s_byte: adding up a byte's worth of elements.
        message_s: handling one more message at the same time.
    """

    alpha_s: float
    beta_s_byte: float
    gamma_s_byte: float
    message_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest algorithm by size, for one group.

    Args:
        size: how many ranks.
        figures: the same at all of them, or they would choose differently.
    """

    size: int
    figures: MeasuredCosts

    def seconds(self, algorithm: str, num_bytes: int) -> float:
        """What the formula predicts for an allreduce."""
        cost, at = ALGORITHMS[algorithm].cost(self.size), self.figures
        return cost.seconds(num_bytes, at.alpha_s, at.beta_s_byte, at.gamma_s_byte, at.message_s)

    def allreduce(self, num_bytes: int) -> str:
        """The algorithm for vectors of so many bytes."""
        return self._cheapest(ALGORITHMS, num_bytes)

    def parts(self, num_bytes: int) -> str:
        """The same for reduce-scatter and all-gather."""
        return self._cheapest([name for name, parts in PARTS.items() if parts.fits(self.size)], num_bytes)

    def _cheapest(self, names: Iterable[str], num_bytes: int) -> str:
        """The ring, unless another one is cheaper by more than `TIE`; of others that are equal the first."""
        costs = {name: self.seconds(name, num_bytes) for name in names}
        cheapest = min(costs, key=costs.__getitem__)
        return RING if costs.get(RING, math.inf) <= (1 + TIE) * costs[cheapest] else cheapest

    def table(self) -> Mapping[int, str]:
        """The choice by the number of bytes from which on it holds."""
        found, at = {0: self.allreduce(0)}, 0
        while at < LARGEST_BYTES:
            last, following = found[max(found)], max(1, 2 * at)
            if self.allreduce(following) != last:
                edge = self._edge(at, following)
                found[edge] = self.allreduce(edge)
                at = edge
            else:
                at = following
        return found

    def _edge(self, below: int, above: int) -> int:
        """The first number of bytes after `below` at which the choice is another."""
        name = self.allreduce(below)
        while above - below > 1:
            middle = (below + above) // 2
            if self.allreduce(middle) == name:
                below = middle
            else:
                above = middle
        return above
