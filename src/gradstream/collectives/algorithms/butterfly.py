"""Butterfly, or recursive doubling: in step k, each rank swaps vectors with the rank 2^k apart.

    0 ◀─▶ 1   2 ◀─▶ 3          with 1 2 3 4:  3 3 7 7
    0 ◀─────▶ 2   1 ◀─────▶ 3                10 10 10 10

It sends the fewest possible messages one after the other, each of the whole vector, which suits short vectors.
Both partners of a pair add the same two vectors, so that all ranks get the same bits.

Reference: Thakur, Rabenseifner, Gropp, 2005, section 4.5.
"""

from __future__ import annotations

from gradstream.collectives.algorithms.folding import Fold
from gradstream.collectives.schedule import Recv, ScheduleCost, Send, Step


def allreduce(rank: int, size: int, elems: int) -> list[Step]:
    """p'·lg p'·n + 2rn bytes in all, with p' the power of two below p, and r = p - p'."""
    fold = Fold.of(rank, size, elems)
    steps = list(fold.before)
    if fold.place is not None:
        distance = 1
        while distance < fold.core:
            partner = fold.rank_of(fold.place ^ distance)
            steps += [Send(partner, 0, elems), Recv(partner, 0, elems, add=True)]
            distance *= 2
    return [*steps, *fold.after]


def cost(size: int) -> ScheduleCost:
    """(α + nβ + nγ)·lg p; (⌊lg p⌋ + 2)(α + nβ) + (⌊lg p⌋ + 1)nγ if p is not a power of two.

    (It may be nβ more then: a rank with nothing to wait for sends its vector while its partner's network card
    still takes in another.)
    """
    levels = size.bit_length() - 1
    if size == 1 << levels:
        return ScheduleCost(levels, levels, levels)
    return ScheduleCost(levels + 2, levels + 2, levels + 1)
