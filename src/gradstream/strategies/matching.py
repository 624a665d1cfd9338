"""Who meets whom in a round, where workers exchange in pairs: a pure function, which every worker computes for itself.

    all ranks, in a random order of the round   3 0 | 4 1 | 5 2        neighbours are partners
    rank 4 is gone                              3 0 | - 1 | 5 2        rank 1 has no partner
    ranks 4 and 5 are gone                      3 0 | - 1 | - 2        those without a partner meet each other: 1 and 2

The order is of all ranks that the run may have, whether they are there or not. So a worker that dies or joins changes
the pairs only of its own partner, and of those that have none; all others meet as they would have met. Of an odd number
of workers one has no partner. It goes through the round alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b

Pair = tuple[int, int]
"""Two ranks, the lower one first."""


def matching(seed: int, number: int, workers: int, live: Collection[int]) -> list[Pair]:
    """The pairs of a round.

    Args:
        seed: seed of the run.
        number: number of the round.
        workers: W, number of ranks that the run has, there or not.
        live: the ranks that are there.

    Returns:
        The pairs; each rank is in one at most.
    """
    order = _order(seed, number, workers)
    pairs, left = list[Pair](), list[int]()
    for first in range(0, workers, 2):
        there = [rank for rank in order[first : first + 2] if rank in live]
        if len(there) == 2:
            pairs.append(_pair(*there))
        else:
            left += there
    pairs += [_pair(*left[first : first + 2]) for first in range(0, len(left) - 1, 2)]
    return pairs


def partner_of(rank: int, seed: int, number: int, workers: int, live: Collection[int]) -> int | None:
    """The rank that one of `live` meets in a round; None if it has no partner. Arguments as for `matching`."""
    for one, other in matching(seed, number, workers, live):
        if rank in (one, other):
            return other if rank == one else one
    return None


def _order(seed: int, number: int, workers: int) -> Sequence[int]:
    """All ranks, in the order of a hash: it is the same with every version of every library."""

    def key(rank: int) -> bytes:
        return blake2b(f"{seed}/{number}/{rank}".encode(), digest_size=16).digest()

    return sorted(range(workers), key=key)


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)
