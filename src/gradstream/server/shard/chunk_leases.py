"""Who is at a shard's chunks where they lie: updates and readers by turns, and who has not let go."""

from __future__ import annotations

import asyncio

from gradstream.transport.base import Lent

__all__ = ["ChunkLeases"]

PATIENCE_S = 2.0
"""A reader copies what it gets at once. One that has stopped shall not hold up all the others' updates."""


class ChunkLeases:
    """By chunk, whose turn it is, and what was lent of it and has not come back."""

    def __init__(self) -> None:
        self._turns: dict[int, asyncio.Lock] = {}
        self._lent: dict[int, list[Lent]] = {}

    def turn(self, chunk: int) -> asyncio.Lock:
        """Updates and readers of a chunk in the order in which they ask: neither starves the other."""
        return self._turns.setdefault(chunk, asyncio.Lock())

    def add(self, chunk: int, lent: Lent) -> None:
        """A chunk was lent once more."""
        if not lent.returned:
            left = [one for one in self._lent.get(chunk, ()) if not one.returned]
            self._lent[chunk] = [*left, lent]

    async def gone(self, chunk: int) -> None:
        """Returns once nobody reads a chunk. A reader that keeps it for `PATIENCE_S` is hung up on."""
        for lent in self._lent.pop(chunk, ()):
            await lent.back(PATIENCE_S)
