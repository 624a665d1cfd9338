"""Algorithms of allreduce. Each has a file with its schedule and its cost."""

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
    """One algorithm of allreduce.

    Args:
        schedule: function (rank, size, elems) that returns the sends and receives of a rank.
        cost: function (size) that returns the cost among `size` ranks.
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
"""The algorithms, by name."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Reduce-scatter and all-gather: the two halves of an allreduce, of which each costs half of the whole.

    Part i of a vector is [cuts[i], cuts[i + 1]).

    Args:
        reduce_scatter: function (rank, cuts) that returns the steps after which rank i has part i of the sum.
        all_gather: function (rank, cuts) that returns the steps after which every rank has part i of each rank i.
        powers_only: whether the number of ranks must be a power of two.
    """

    reduce_scatter: Callable[[int, Sequence[int]], list[Step]]
    all_gather: Callable[[int, Sequence[int]], list[Step]]
    powers_only: bool = False

    def fits(self, size: int) -> bool:
        """Whether the algorithm works among `size` ranks."""
        return not self.powers_only or size & (size - 1) == 0


PARTS: Mapping[str, Parts] = {
    "halving-doubling": Parts(halving_doubling.reduce_scatter, halving_doubling.all_gather, powers_only=True),
    "ring": Parts(ring.reduce_scatter, ring.all_gather),
    "direct": Parts(direct.reduce_scatter, direct.all_gather),
}
"""The halves, by name of the algorithm."""
