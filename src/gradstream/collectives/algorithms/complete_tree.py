r"""A complete binary tree: partial sums go up, and the total comes down.

    rank        6
              /   \
             5     4
            / \   / \
           3   2 1   0

The root is the last rank, its children are the two before it, and so on, level by level. With vectors 1 to 7 the
middle ranks get 13 and 8, and the root 28: two steps up and two down. A rank receives the vectors of both children
one after the other, so a level costs two of them.
"""

from __future__ import annotations

from gradstream.collectives.schedule import Recv, ScheduleCost, Send, Step


def allreduce(rank: int, size: int, elems: int) -> list[Step]:
    """2(p-1) messages of n; 2(p-1)n bytes in all."""
    place = size - 1 - rank  # number in a heap, level by level from the root
    children = [size - 1 - child for child in (2 * place + 1, 2 * place + 2) if child < size]
    steps: list[Step] = [Recv(child, 0, elems, add=True) for child in children]
    if place:
        parent = size - 1 - (place - 1) // 2
        steps += [Send(parent, 0, elems), Recv(parent, 0, elems)]
    return steps + [Send(child, 0, elems) for child in children]


def cost(size: int) -> ScheduleCost:
    """2dα + 4dnβ + 2dnγ with d = ⌊lg p⌋ levels, if all are full (p = 2^k - 1); less otherwise.

    Two ranks have a level with one child: 2α + 2nβ + nγ.
    """
    if size == 2:
        return ScheduleCost(2, 2, 1)
    depth = size.bit_length() - 1
    return ScheduleCost(2 * depth, 4 * depth, 2 * depth, overhead=depth)
