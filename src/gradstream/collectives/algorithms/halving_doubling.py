"""Halving-doubling (Rabenseifner): ranks reduce halves of halves, and then put them together again.

    reduce-scatter, 4 ranks           all-gather
    0 ◀─ half of the vector ─▶ 2      0 ◀─ a quarter ─▶ 1
    1 ◀─ half of the vector ─▶ 3      2 ◀─ a quarter ─▶ 3
    0 ◀─ a quarter ─▶ 1               0 ◀─ a half ─▶ 2
    2 ◀─ a quarter ─▶ 3               1 ◀─ a half ─▶ 3

One rank sums up each slice, which is then copied. So this sends as few bytes as possible, in 2·lg p messages.

Reference: Rabenseifner, "Optimization of collective reduction operations", 2004; Thakur, Rabenseifner,
Gropp, 2005, section 4.5. There the nearest partners come first. Here the farthest do, so that rank i gets
slice i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradstream.collectives.algorithms.folding import Fold
from gradstream.collectives.schedule import Recv, ScheduleCost, Send, Step, cuts_of


def allreduce(rank: int, size: int, elems: int) -> list[Step]:
    """2(p-1)n bytes in all."""
    fold = Fold.of(rank, size, elems)
    steps = list(fold.before)
    if fold.place is not None:
        cuts = cuts_of(elems, fold.core)
        steps += reduce_scatter(fold.place, cuts, fold.rank_of) + all_gather(fold.place, cuts, fold.rank_of)
    return [*steps, *fold.after]


def _itself(place: int) -> int:
    return place


def reduce_scatter(place: int, cuts: Sequence[int], rank_of: Callable[[int], int] = _itself) -> list[Step]:
    """Gives place i of a power of two of places part i of the sum, [cuts[i], cuts[i + 1]).

    Args:
        cuts: edges of the parts.
        rank_of: (place) to the rank there.
    """
    first, last = 0, len(cuts) - 1  # the parts that this place still works on
    steps: list[Step] = []
    while last - first > 1:
        middle = (first + last) // 2
        partner = rank_of(place ^ (last - middle))
        lower, upper = (cuts[first], cuts[middle]), (cuts[middle], cuts[last])
        kept, sent = (upper, lower) if place >= middle else (lower, upper)
        steps += [Send(partner, *sent), Recv(partner, *kept, add=True)]
        first, last = (middle, last) if place >= middle else (first, middle)
    return steps


def all_gather(place: int, cuts: Sequence[int], rank_of: Callable[[int], int] = _itself) -> list[Step]:
    """Gives all of a power of two of places part i of place i; see `reduce_scatter`."""
    steps: list[Step] = []
    distance = 1
    while distance < len(cuts) - 1:
        own = place // distance * distance
        other = own ^ distance
        partner = rank_of(place ^ distance)
        steps += [
            Send(partner, cuts[own], cuts[own + distance]),
            Recv(partner, cuts[other], cuts[other + distance]),
        ]
        distance *= 2
    return steps


def cost(size: int) -> ScheduleCost:
    """2·lg p·α + 2(p-1)/p·nβ + (p-1)/p·nγ.

    (2⌊lg p⌋ + 2)α + (2(p-1)/p + 2)nβ + (1 + (p-1)/p)nγ if p is not a power of two: then two more vectors
    pass one after the other. (It may be nβ/2 more: a rank with nothing to wait for sends its first half while
    its partner's network card still takes in a whole vector.)
    """
    levels = size.bit_length() - 1
    share = (size - 1) / size
    if size == 1 << levels:
        return ScheduleCost(2 * levels, 2 * share, share)
    return ScheduleCost(2 * levels + 2, 2 * share + 2, 1 + share)
