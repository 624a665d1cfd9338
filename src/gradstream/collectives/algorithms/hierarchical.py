"""Hierarchical: ranks sum up inside each host first, so that only the least goes between hosts.

    host A: 0 1   host B: 2 3 4         G = 2 slices, one for each of the first G ranks of a host

    inside a host       each rank sends slice k to rank k, which sums it up
    between hosts       the ranks k of all hosts sum up slice k round a ring
    inside a host       rank k sends slice k to each rank

G is the number of ranks on the smallest host. So a host's network card carries 2(m-1)/m vectors for m hosts,
however many ranks the host has. The rest stays inside.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradstream.collectives.algorithms import ring
from gradstream.collectives.schedule import Recv, ScheduleCost, Send, Step, cuts_of


def allreduce(rank: int, hosts: Sequence[Sequence[int]], elems: int) -> list[Step]:
    """2(p-1)n bytes in all if all hosts have equally many ranks.

    Args:
        rank: the rank that gets the schedule.
        hosts: the ranks of each host.
        elems: length of the vector.
    """
    own = next(host for host in hosts if rank in host)
    slices = min(map(len, hosts))
    cuts = cuts_of(elems, slices)
    place = own.index(rank)
    others = [*own[place + 1 :], *own[:place]]  # the next one first: no two send to the same one at once
    owners = [(peer, own.index(peer)) for peer in others if own.index(peer) < slices]
    steps: list[Step] = [Send(peer, cuts[part], cuts[part + 1]) for peer, part in owners]
    if place < slices:
        start, stop = cuts[place], cuts[place + 1]
        steps += [Recv(peer, start, stop, add=True) for peer in reversed(others)]
        steps += _across([host[place] for host in hosts], rank, start, stop)
        steps += [Send(peer, start, stop) for peer in others]
    return steps + [Recv(peer, cuts[part], cuts[part + 1]) for peer, part in reversed(owners)]


def _across(ranks: Sequence[int], rank: int, start: int, stop: int) -> list[Step]:
    """The schedule of a ring of `ranks`, on a part of the vector."""
    steps = ring.allreduce(ranks.index(rank), len(ranks), stop - start)
    return [
        Send(ranks[step.peer], start + step.start, start + step.stop)
        if isinstance(step, Send)
        else Recv(ranks[step.peer], start + step.start, start + step.stop, step.add)
        for step in steps
    ]


def costs(hosts: int, ranks_each: int) -> tuple[ScheduleCost, ScheduleCost]:
    """Costs inside hosts and between them, for m hosts of g ranks. The time is the sum of both.

    2α + 2(g-1)/g·nβ + (g-1)/g·nγ inside, 2(m-1)α + 2(m-1)/(mg)·nβ + (m-1)/(mg)·nγ between.
    """
    inside, between = (ranks_each - 1) / ranks_each, (hosts - 1) / hosts / ranks_each
    return (
        ScheduleCost(2 if ranks_each > 1 else 0, 2 * inside, inside),
        ScheduleCost(2 * (hosts - 1), 2 * between, between),
    )
