"""Whose answer a worker waited for: claims on its waiting time, and how they share it.

The client notes a claim whenever an answer arrives: a shard, for the time since it was asked; or
another worker, for the time until its contribution had come. Claims overlap one another and the
worker's own computing. `shared_out` gives each moment of waiting to one of them: to the worker
itself if its own arithmetic was what it waited for, else to another worker, else to a shard, and
among equals to the one that came last, for it alone decided how long the wait was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

__all__ = ["Interval", "Kind", "WaitAttribution", "shared_out"]

Interval = tuple[int, int]
"""Begin and end, in nanoseconds."""


class Kind(IntEnum):
    """Which claims go first."""

    OWN = 0
    WORKER = 1
    SHARD = 2


class WaitAttribution:
    """The claims since they were taken last."""

    def __init__(self) -> None:
        self._ends: dict[tuple[Kind, str, int], int] = {}  # (kind, who, begin) -> end

    def note(self, kind: Kind, who: str, begin_ns: int, end_ns: int) -> None:
        """`who` kept this worker waiting, if it was waiting; claims of one begin are one."""
        key = (kind, who, begin_ns)
        self._ends[key] = max(end_ns, self._ends.get(key, end_ns))

    def take(self, waiting: Iterable[Interval]) -> dict[str, int]:
        """How many nanoseconds of `waiting` were due to whom; forgets the claims."""
        claims = [(kind, who, (begin, end)) for (kind, who, begin), end in self._ends.items()]
        self._ends.clear()
        return shared_out(waiting, claims)


def shared_out(waiting: Iterable[Interval], claims: Sequence[tuple[Kind, str, Interval]]) -> dict[str, int]:
    """Each moment of `waiting` to the first claim that covers it, in the order of the module's text."""
    left = list(waiting)
    shares: dict[str, int] = {}
    for _, who, (begin, end) in sorted(claims, key=lambda claim: (claim[0], -claim[2][1], claim[1])):
        taken = sum(max(0, min(end, stop) - max(begin, start)) for start, stop in left)
        if taken:
            shares[who] = shares.get(who, 0) + taken
            left = [piece for interval in left for piece in _without(interval, (begin, end))]
    return shares


def _without(whole: Interval, hole: Interval) -> list[Interval]:
    """What is left of an interval."""
    pieces = [(whole[0], min(whole[1], hole[0])), (max(whole[0], hole[1]), whole[1])]
    return [(begin, end) for begin, end in pieces if begin < end]
