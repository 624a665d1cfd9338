"""Direct: each rank sends slice i to rank i, which sums them up and sends the sum to all.

    every rank ─ slice i ─▶ i ─ Σ slice i ─▶ every rank

It sends as few bytes as possible, in two steps. But every rank talks to every other, p-1 messages at a time. In
step k rank r sends to rank r+k, so that no two ranks send to the same one at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradstream.collectives.schedule import Recv, ScheduleCost, Send, Step, cuts_of


def allreduce(rank: int, size: int, elems: int) -> list[Step]:
    """2p(p-1) messages; 2(p-1)n bytes in all, and 2(p-1)/p·n by each rank."""
    cuts = cuts_of(elems, size)
    return reduce_scatter(rank, cuts) + all_gather(rank, cuts)


def reduce_scatter(rank: int, cuts: Sequence[int]) -> list[Step]:
    """Gives rank i part i of the sum, [cuts[i], cuts[i + 1])."""
    size = len(cuts) - 1
    steps: list[Step] = []
    for turn in range(1, size):
        to = (rank + turn) % size
        steps.append(Send(to, cuts[to], cuts[to + 1]))
    for turn in range(1, size):
        steps.append(Recv((rank - turn) % size, cuts[rank], cuts[rank + 1], add=True))
    return steps


def all_gather(rank: int, cuts: Sequence[int]) -> list[Step]:
    """Gives all ranks part i of rank i."""
    size = len(cuts) - 1
    steps: list[Step] = []
    for turn in range(1, size):
        steps.append(Send((rank + turn) % size, cuts[rank], cuts[rank + 1]))
    for turn in range(1, size):
        of = (rank - turn) % size
        steps.append(Recv(of, cuts[of], cuts[of + 1]))
    return steps


def cost(size: int) -> ScheduleCost:
    """2α + 2(p-1)/p·nβ + (p-1)/p·nγ: messages of one step go at the same time and share the network card."""
    share = (size - 1) / size
    return ScheduleCost(2, 2 * share, share, overhead=2 * (size - 2)) if size > 1 else ScheduleCost(0, 0)


# ---- all-to-all --------------------------------------------------------------------------
# All-to-all: slice s of each rank's vector goes to rank s, whose slice for this rank takes its place.
#
#     rank 0   a0 a1 a2        a0 b0 c0
#     rank 1   b0 b1 b2   ──▶  a1 b1 c1        p-1 messages of n/p elements each way, all at the same time
#     rank 2   c0 c1 c2        a2 b2 c2
#
# It is a transposition, and adds nothing up.


def all_to_all(rank: int, cuts: Sequence[int]) -> list[Step]:
    """Slice s is [cuts[s], cuts[s + 1]); all have the same length."""
    size = len(cuts) - 1
    others = [(rank + turn) % size for turn in range(1, size)]
    sends: list[Step] = [Send(peer, cuts[peer], cuts[peer + 1]) for peer in others]
    return [*sends, *(Recv(peer, cuts[peer], cuts[peer + 1]) for peer in reversed(others))]
