"""Chunks in use: updates and readers take turns, and an update waits until readers have returned the chunk."""

from __future__ import annotations

import asyncio

from gradstream.transport.base import Lent

__all__ = ["ChunkLeases"]

PATIENCE_S = 2.0
"""Seconds that an update waits for a reader. Readers copy at once; one that has stopped must not delay the others."""


class ChunkLeases:
    """For each chunk, a lock that updates and readers take, and the loans that readers have not returned."""

    def __init__(self) -> None:
        self._turns: dict[int, asyncio.Lock] = {}
        self._lent: dict[int, list[Lent]] = {}

    def turn(self, chunk: int) -> asyncio.Lock:
        """The lock of a chunk. Tasks get it in the order of their requests, so none of them starves."""
        return self._turns.setdefault(chunk, asyncio.Lock())

    def add(self, chunk: int, lent: Lent) -> None:
        """Notes that a chunk is lent to a reader."""
        if not lent.returned:
            left = [one for one in self._lent.get(chunk, ()) if not one.returned]
            self._lent[chunk] = [*left, lent]

    async def gone(self, chunk: int) -> None:
        """Returns once nobody reads a chunk. Closes the stream to a reader that keeps it for `PATIENCE_S`."""
        for lent in self._lent.pop(chunk, ()):
            await lent.back(PATIENCE_S)
