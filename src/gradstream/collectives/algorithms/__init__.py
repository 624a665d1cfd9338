"""Allreduce, one algorithm a file: its schedule and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from gradstream.collectives.schedule import Cost, MakeSchedule

__all__ = ["ALGORITHMS", "Algorithm"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way of allreduce.

    Args:
        schedule: of (rank, size, elems).
        cost: of the number of ranks.
    """

    schedule: MakeSchedule
    cost: Callable[[int], Cost]


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
