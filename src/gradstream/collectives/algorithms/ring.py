"""Ring: each rank sends to the next one only, one slice at a time.

    0 ─▶ 1 ─▶ 2 ─▶ 3 ─▶ 0 ...      p-1 steps in which slices are summed up on their way round,
                                   p-1 steps in which the sums go round

It sends as few bytes as possible, for any number of ranks, and keeps all network cards busy all the time, in 2(p-1)
messages one after the other. For long vectors the time does not grow with the number of ranks. One slow link slows
all ranks down.

Reference: Patarasu, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradstream.collectives.schedule import Recv, ScheduleCost, Send, Step, cuts_of


def allreduce(rank: int, size: int, elems: int) -> list[Step]:
    """2(p-1)n bytes in all, and 2(p-1)/p·n by each rank."""
    cuts = cuts_of(elems, size)
    return reduce_scatter(rank, cuts) + all_gather(rank, cuts)


def reduce_scatter(rank: int, cuts: Sequence[int]) -> list[Step]:
    """Gives rank i part i of the sum, [cuts[i], cuts[i + 1])."""
    size = len(cuts) - 1
    steps: list[Step] = []
    for turn in range(1, size):
        sent, kept = (rank - turn) % size, (rank - turn - 1) % size
        steps += [
            Send((rank + 1) % size, cuts[sent], cuts[sent + 1]),
            Recv((rank - 1) % size, cuts[kept], cuts[kept + 1], add=True),
        ]
    return steps


def all_gather(rank: int, cuts: Sequence[int]) -> list[Step]:
    """Gives all ranks part i of rank i."""
    size = len(cuts) - 1
    steps: list[Step] = []
    for turn in range(size - 1):
        sent, taken = (rank - turn) % size, (rank - turn - 1) % size
        steps += [
            Send((rank + 1) % size, cuts[sent], cuts[sent + 1]),
            Recv((rank - 1) % size, cuts[taken], cuts[taken + 1]),
        ]
    return steps


def cost(size: int) -> ScheduleCost:
    """2(p-1)α + 2(p-1)/p·nβ + (p-1)/p·nγ."""
    share = (size - 1) / size
    return ScheduleCost(2 * (size - 1), 2 * share, share)
