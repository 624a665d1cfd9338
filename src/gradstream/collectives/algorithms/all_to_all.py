"""All-to-all: slice s of each rank's vector goes to rank s, whose slice for this rank takes its place.

    rank 0   a0 a1 a2        a0 b0 c0
    rank 1   b0 b1 b2   ──▶  a1 b1 c1        p-1 messages of n/p elements each way, all at the same time
    rank 2   c0 c1 c2        a2 b2 c2

It is a transposition, and adds nothing up.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradstream.collectives.schedule import Recv, Send, Step


def all_to_all(rank: int, cuts: Sequence[int]) -> list[Step]:
    """Slice s is [cuts[s], cuts[s + 1]); all have the same length."""
    size = len(cuts) - 1
    others = [(rank + turn) % size for turn in range(1, size)]
    sends: list[Step] = [Send(peer, cuts[peer], cuts[peer + 1]) for peer in others]
    return [*sends, *(Recv(peer, cuts[peer], cuts[peer + 1]) for peer in reversed(others))]
