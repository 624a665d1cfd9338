"""Allreduce, one algorithm a file: its schedule and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradstream.collectives.algorithms import (
    binomial_tree,
    butterfly,
    complete_tree,
    direct,
    halving_doubling,
    naive,
    ring,
)
from gradstream.collectives.schedule import MakeSchedule, ScheduleCost, Step

__all__ = ["ALGORITHMS", "PARTS", "Algorithm", "Parts"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way of allreduce.

    Args:
        schedule: of (rank, size, elems).
        cost: of the number of ranks.
    """

    schedule: MakeSchedule
    cost: Callable[[int], ScheduleCost]


ALGORITHMS: Mapping[str, Algorithm] = {
    "naive": Algorithm(naive.allreduce, naive.cost),
    "complete-tree": Algorithm(complete_tree.allreduce, complete_tree.cost),
    "binomial-tree": Algorithm(binomial_tree.allreduce, binomial_tree.cost),
    "butterfly": Algorithm(butterfly.allreduce, butterfly.cost),
    "halving-doubling": Algorithm(halving_doubling.allreduce, halving_doubling.cost),
    "ring": Algorithm(ring.allreduce, ring.cost),
    "direct": Algorithm(direct.allreduce, direct.cost),
}
"""By name."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The halves of an allreduce, for who needs them alone: each costs half of it.

    Args:
        reduce_scatter: of (rank, cuts): part i, [cuts[i], cuts[i + 1]), of the sum to rank i.
        all_gather: of (rank, cuts): part i of rank i to all.
        powers_only: whether it takes a power of two of ranks.
    """

    reduce_scatter: Callable[[int, Sequence[int]], list[Step]]
    all_gather: Callable[[int, Sequence[int]], list[Step]]
    powers_only: bool = False

    def fits(self, size: int) -> bool:
        """Whether so many ranks can use it."""
        return not self.powers_only or size & (size - 1) == 0


PARTS: Mapping[str, Parts] = {
    "halving-doubling": Parts(halving_doubling.reduce_scatter, halving_doubling.all_gather, powers_only=True),
    "ring": Parts(ring.reduce_scatter, ring.all_gather),
    "direct": Parts(direct.reduce_scatter, direct.all_gather),
}
"""By the name of the algorithm that they are of."""
