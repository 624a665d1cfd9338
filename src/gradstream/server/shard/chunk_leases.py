"""Chunks in use: updates and readers take turns, and an update waits until what was lent has come back."""

from __future__ import annotations

import asyncio

from gradstream.transport.base import Lent

__all__ = ["ChunkLeases"]

PATIENCE_S = 2.0
"""Seconds that an update waits for a reader: readers copy at once, and one that has stopped must not hold up others."""


class ChunkLeases:
    """By chunk, a lock that updates and readers take, and the loans that have not come back."""

    def __init__(self) -> None:
        self._turns: dict[int, asyncio.Lock] = {}
        self._lent: dict[int, list[Lent]] = {}

    def turn(self, chunk: int) -> asyncio.Lock:
        """The lock of a chunk, granted in the order of asking: updates and readers do not starve each other."""
        return self._turns.setdefault(chunk, asyncio.Lock())

    def add(self, chunk: int, lent: Lent) -> None:
        """Notes that a chunk was lent."""
        if not lent.returned:
            left = [one for one in self._lent.get(chunk, ()) if not one.returned]
            self._lent[chunk] = [*left, lent]

    async def gone(self, chunk: int) -> None:
        """Returns once nobody reads a chunk. The stream to a reader that keeps it for `PATIENCE_S` is closed."""
        for lent in self._lent.pop(chunk, ()):
            await lent.back(PATIENCE_S)
