"""A binomial tree: in step k, ranks that are 2^k apart pair up, and the upper one of each pair is done.

    0 ◀─ 1   2 ◀─ 3   4 ◀─ 5   6 ◀─ 7
    0 ◀────── 2       4 ◀────── 6
    0 ◀────────────── 4                 and back the same way: the broadcast

Half of the ranks that are left send the whole vector in each step, which suits short vectors.

Reference: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH",
2005, section 4 (broadcast, reduce).
"""

from __future__ import annotations

from gradstream.collectives.schedule import Recv, ScheduleCost, Send, Step


def allreduce(rank: int, size: int, elems: int) -> list[Step]:
    """2(p-1) messages of n; 2(p-1)n bytes in all, of which rank 0 sends ⌈lg p⌉n."""
    return reduce(rank, size, elems) + broadcast(rank, size, elems)


def reduce(rank: int, size: int, elems: int) -> list[Step]:
    """Sums up to rank 0. The vectors of other ranks are of no use afterwards."""
    steps: list[Step] = []
    distance = 1
    while distance < size:
        if rank & distance:
            return [*steps, Send(rank - distance, 0, elems)]
        if rank + distance < size:
            steps.append(Recv(rank + distance, 0, elems, add=True))
        distance *= 2
    return steps


def broadcast(rank: int, size: int, elems: int, root: int = 0) -> list[Step]:
    """Sends the vector of rank `root` to all: p-1 messages of n."""
    place = (rank - root) % size
    steps: list[Step] = []
    distance = 1
    while distance < size and not place & distance:
        distance *= 2
    if place:
        steps.append(Recv((place - distance + root) % size, 0, elems))
    while distance > 1:
        distance //= 2
        if place + distance < size:
            steps.append(Send((place + distance + root) % size, 0, elems))
    return steps


def cost(size: int) -> ScheduleCost:
    """2⌈lg p⌉α + 2⌈lg p⌉nβ + ⌈lg p⌉nγ; exact if p is a power of two, otherwise an upper bound."""
    levels = (size - 1).bit_length()
    return ScheduleCost(2 * levels, 2 * levels, levels)
