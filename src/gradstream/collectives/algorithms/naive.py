"""Through one rank: all others send it their vectors, and it adds them up and sends the sum back.

    1 ─┐        ┌─▶ 1
    2 ─┼─▶ 0 ───┼─▶ 2
    3 ─┘        └─▶ 3

It adds in the order of ranks, as a parameter server does. Its network card receives p-1 vectors and sends as many,
so that the time grows with the number of ranks.
"""

from __future__ import annotations

from gradstream.collectives.schedule import Recv, ScheduleCost, Send, Step


def allreduce(rank: int, size: int, elems: int) -> list[Step]:
    """2(p-1) messages of n; 2(p-1)n bytes in all, of which rank 0 sends half."""
    if rank:
        return [Send(0, 0, elems), Recv(0, 0, elems)]
    others = range(1, size)
    return [*(Recv(peer, 0, elems, add=True) for peer in others), *(Send(peer, 0, elems) for peer in others)]


def cost(size: int) -> ScheduleCost:
    """2α + 2(p-1)nβ + (p-1)nγ: messages of one direction go at the same time and share the network card."""
    return ScheduleCost(2, 2 * (size - 1), size - 1, overhead=size - 2) if size > 1 else ScheduleCost(0, 0)
