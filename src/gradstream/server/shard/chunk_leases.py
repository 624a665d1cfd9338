"""Keeps a shard from overwriting a chunk that a reader still reads.

A shard sends a chunk to a fetching worker on the same machine without a copy: it lends the memory of the chunk.
An update writes the same memory, so it waits until the workers have returned the chunk.
"""

from __future__ import annotations

import asyncio

from gradstream.transport.base import Lent

PATIENCE_S = 2.0
"""How long an update waits for a reader, in seconds. Readers copy at once; a hung reader must not delay the others."""


class ChunkLeases:
    """Keeps a lock for each chunk of a shard, and the loans of the chunk that readers have not returned yet.

    A task holds the lock while it updates the chunk or lends it to a reader.
    """

    def __init__(self) -> None:
        self._turns: dict[int, asyncio.Lock] = {}
        self._lent: dict[int, list[Lent]] = {}

    def turn(self, chunk: int) -> asyncio.Lock:
        """The lock of a chunk. Tasks get it in the order in which they asked for it, so none starves."""
        return self._turns.setdefault(chunk, asyncio.Lock())

    def add(self, chunk: int, lent: Lent) -> None:
        """Notes that a chunk is lent to a reader."""
        if not lent.returned:
            left = [one for one in self._lent.get(chunk, ()) if not one.returned]
            self._lent[chunk] = [*left, lent]

    async def gone(self, chunk: int) -> None:
        """Returns when no reader has the chunk any more, so that an update may write it.

        If a reader does not return the chunk within `PATIENCE_S`, its connection is closed.
        """
        for lent in self._lent.pop(chunk, ()):
            await lent.back(PATIENCE_S)
