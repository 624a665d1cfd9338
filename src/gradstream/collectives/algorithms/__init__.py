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
        schedule: (rank, size, elems) to the schedule of a rank.
        cost: (size) to the cost.
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
    """The two halves of an allreduce, for callers that need one alone. Each costs half of the whole.

    Args:
        reduce_scatter: (rank, cuts) to the schedule by which rank i gets part i, [cuts[i], cuts[i + 1]), of the
            sum.
        all_gather: (rank, cuts) to the schedule by which all ranks get part i of rank i.
        powers_only: whether the number of ranks has to be a power of two.
    """

    reduce_scatter: Callable[[int, Sequence[int]], list[Step]]
    all_gather: Callable[[int, Sequence[int]], list[Step]]
    powers_only: bool = False

    def fits(self, size: int) -> bool:
        """Whether `size` ranks can use it."""
        return not self.powers_only or size & (size - 1) == 0


PARTS: Mapping[str, Parts] = {
    "halving-doubling": Parts(halving_doubling.reduce_scatter, halving_doubling.all_gather, powers_only=True),
    "ring": Parts(ring.reduce_scatter, ring.all_gather),
    "direct": Parts(direct.reduce_scatter, direct.all_gather),
}
"""The halves, by name of the algorithm."""
