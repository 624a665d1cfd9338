"""`HierarchicalGroup`: in place inside each host, by messages between hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch

from gradstream.collectives.communicator import Communicator
from gradstream.collectives.group import Group, slice_of
from gradstream.collectives.message_group import MessageGroup
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Work

__all__ = ["HierarchicalGroup"]


class HierarchicalGroup:
    """Implements `Group` for hosts of as many ranks each.

    An allreduce is a reduce-scatter inside the host, an allreduce of the slice among the ranks of the
    same place of all hosts, and an all-gather inside the host. A rank that is lost, wherever, breaks it
    all, and every rank hears its name.

    Args:
        mesh: of all ranks, who have met. Closed with this group.
        inside: the ranks of this host.
        between: those of the same place on each host, on `mesh`.
        whole: all ranks, on `mesh`, for what has no such parts.
    """

    shares_memory = False

    def __init__(self, mesh: Communicator, inside: Group, between: MessageGroup, whole: MessageGroup) -> None:
        self.rank, self.size = mesh.rank, mesh.size
        self.names: Sequence[str] = mesh.names
        self._mesh = mesh
        self._inside = inside
        self._between = between
        self._whole = whole
        self._turn = asyncio.Lock()  # serves in the order of coming

    def allocate(self, elems: int, dtype: torch.dtype, name: str, *, lead_bytes: int = 0) -> Vector:
        """See `Group.allocate`: where the host's own group works in place."""
        return self._inside.allocate(elems, dtype, name, lead_bytes=lead_bytes)

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """See `Group.common`: each rank has its own."""
        return self.allocate(elems, dtype, name)

    async def allreduce(self, span: Span, *, weight: float = 1.0) -> Span:
        """See `Group.allreduce`: the sum lies in `span`."""
        async with self._turn:
            await self._mesh.guarded(self._allreduce(span, weight))
        return span

    async def _allreduce(self, span: Span, weight: float) -> None:
        own = await self._inside.reduce_scatter(span, weight=weight)
        start, stop = slice_of(len(span), self._inside.rank, self._inside.size)
        place = Span(span.vector, span.start + start, span.start + stop)
        if (own.vector, own.start) != (place.vector, place.start):
            await self._mesh.runtime.compute(
                lambda _: _copy(place.tensor, own.tensor),
                work=Work("copy", elems=len(own)),
                reads=[own],
                writes=[place],
                lane="exchange",
            )
        await self._between.allreduce(place)
        await self._inside.all_gather(span)

    async def reduce_scatter(self, span: Span, *, weight: float = 1.0) -> Span:
        """See `Group.reduce_scatter`."""
        async with self._turn:
            return await self._whole.reduce_scatter(span, weight=weight)

    async def all_gather(self, span: Span) -> None:
        """See `Group.all_gather`."""
        async with self._turn:
            await self._whole.all_gather(span)

    async def broadcast(self, span: Span, *, root: int = 0) -> None:
        """See `Group.broadcast`."""
        async with self._turn:
            await self._whole.broadcast(span, root=root)

    async def close(self) -> None:
        """See `Group.close`."""
        await self._inside.close()
        await self._mesh.close()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    np.copyto(target.numpy(), source.numpy())
