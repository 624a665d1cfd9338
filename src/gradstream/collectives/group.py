"""The `Group`: ranks that combine their vectors, under one membership epoch, without a server.

Every rank calls the same operations in the same order, with spans of the same length: this is what a
group matches them by. All ranks get the same bits, which depend on no timing.

A rank that dies or stays silent fails the operation for every other one, within the deadline: each gets
a `PeerLostError` or a `DeadlineError` that names the rank, and the group is broken: every operation
after that raises the same. What the operation's memory holds is then undefined, so an update is made
only of a result that has been returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gradstream.memory import Span, Vector

__all__ = ["Group", "slice_of"]


def slice_of(elems: int, rank: int, size: int) -> tuple[int, int]:
    """[start, stop) of the slice that `rank` of `size` owns of so many elements.

    Edges are multiples of 64 elements where there are enough, since update rules round differently at
    unaligned cuts; slices differ by at most 64 elements, and the last ones may be empty.
    """
    blocks = -(-elems // 64)
    start, stop = blocks * rank // size * 64, blocks * (rank + 1) // size * 64
    return min(start, elems), min(stop, elems)


class Group(Protocol):
    """Ranks 0 to size-1 of one run, and what they can do together."""

    rank: int
    size: int
    names: Sequence[str]  # of the nodes, by rank
    shares_memory: bool  # what `common` gives is one vector for all

    def allocate(self, elems: int, dtype: torch.dtype, name: str, *, lead_bytes: int = 0) -> Vector:
        """A vector of zeros, where this group works best in place.

        Every rank allocates the same vectors in the same order. Spans of other vectors can be given to
        every operation too; a carrier of shared memory copies them first.

        Args:
            lead_bytes: how far past a multiple of 64 bytes it begins, where the group can choose.
        """
        ...

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """A vector of zeros for what all ranks have alike: one for all, where the group shares memory.

        Elsewhere each rank gets its own. A rank writes its own `slice_of` a span alone, while no other
        reads it, and calls `all_gather` of that span: which moves nothing where the vector is one for all.
        Every rank asks for the same ones, in the same order.

        Raises:
            PeerLostError, DeadlineError: a rank that has to make it is gone or silent.
        """
        ...

    async def allreduce(self, span: Span, *, weight: float = 1.0) -> Span:
        """Σ_r weight_r · span_r, over all ranks.

        Args:
            span: this rank's; lent for reading and writing until the call returns, undefined after it
                unless it is what is returned.
            weight: this rank's, multiplied in before the sum.

        Returns:
            Where the sum lies: `span` itself, or memory of the group's. It can be read until the next
            operation on any of the same elements: buckets of one vector are summed one after the
            other, and read together. Of a vector that is not the group's own, until the next operation.

        Raises:
            PeerLostError, DeadlineError: naming a rank; the group is broken.
        """
        ...

    async def reduce_scatter(self, span: Span, *, weight: float = 1.0) -> Span:
        """As `allreduce`, but each rank gets only its own `slice_of` the sum."""
        ...

    async def all_gather(self, span: Span) -> None:
        """Each rank's own `slice_of` the span, to every rank: afterwards all have all of it, in `span`."""
        ...

    async def broadcast(self, span: Span, *, root: int = 0) -> None:
        """The span of rank `root`, into that of every rank."""
        ...

    async def close(self) -> None:
        """Gives back what the group holds. Others that wait for this rank fail. Idempotent."""
        ...
