"""Attributes the waiting time of a worker to the nodes for which it waited.

The client notes a claim when an answer arrives: of a shard, for the time since the request; or of another worker, for
the time until its contribution arrived. Claims overlap one another and the worker's computing. `shared_out` gives each
part of the waiting to one claim: to the worker itself if it waited for its own arithmetic, else to another worker, else
to a shard; among equals to the claim that ended last, since it alone decided how long the worker waited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

Interval = tuple[int, int]
"""Begin and end, in nanoseconds."""


class Kind(IntEnum):
    """The node of a claim; lower values come first."""

    OWN = 0
    WORKER = 1
    SHARD = 2


class WaitAttribution:
    """Collects claims until `take` divides the waiting time among them."""

    def __init__(self) -> None:
        self._ends: dict[tuple[Kind, str, int], int] = {}  # (kind, who, begin) -> end

    def note(self, kind: Kind, who: str, begin_ns: int, end_ns: int) -> None:
        """Notes a claim of node `who`. Claims with the same begin become one."""
        key = (kind, who, begin_ns)
        self._ends[key] = max(end_ns, self._ends.get(key, end_ns))

    def take(self, waiting: Iterable[Interval]) -> dict[str, int]:
        """The nanoseconds of `waiting` by node. Forgets the claims."""
        claims = [(kind, who, (begin, end)) for (kind, who, begin), end in self._ends.items()]
        self._ends.clear()
        return shared_out(waiting, claims)


def shared_out(waiting: Iterable[Interval], claims: Sequence[tuple[Kind, str, Interval]]) -> dict[str, int]:
    """The nanoseconds of `waiting` by node: each part goes to the first claim that covers it, in the order above."""
    left = list(waiting)
    shares: dict[str, int] = {}
    for _, who, (begin, end) in sorted(claims, key=lambda claim: (claim[0], -claim[2][1], claim[1])):
        taken = sum(max(0, min(end, stop) - max(begin, start)) for start, stop in left)
        if taken:
            shares[who] = shares.get(who, 0) + taken
            left = [piece for interval in left for piece in _without(interval, (begin, end))]
    return shares


def _without(whole: Interval, hole: Interval) -> list[Interval]:
    """The parts of an interval outside of a hole."""
    pieces = [(whole[0], min(whole[1], hole[0])), (max(whole[0], hole[1]), whole[1])]
    return [(begin, end) for begin, end in pieces if begin < end]
