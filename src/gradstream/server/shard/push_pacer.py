"""The `PushPacer`: pushes of one round are read side by side, so that the slowest of them gets the network."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

LEAD_CHUNKS = 2
"""Chunks that a push may be ahead of the slowest. What its sender has credit for comes on top."""


class PushPacer:
    """Decides which push of a round the shard reads next: none that is far ahead of the slowest under way.

    Every worker of a synchronous round waits for the last chunk of the slowest push. Connections share a network
    card unevenly. A push that gets ahead takes bandwidth from the push that all wait for, and meanwhile the shard
    has no complete chunk to send: its card is busy in one direction only. A push that the shard does not read runs
    out of credit, its sender pauses, and the others get the bandwidth. A push that has not begun, or has ended,
    holds nobody up. The order of summation is not affected.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, _Round] = {}

    @contextmanager
    def push(self, number: int) -> Iterator[PacedPush]:
        """Paces one push of the round of this number. The context is the push: it begins and ends with it."""
        pushes = self._rounds.setdefault(number, _Round())
        push = PacedPush(pushes)
        pushes.moved(None, 0)
        try:
            yield push
        finally:
            pushes.moved(push.num_read, None)
            if not pushes:
                del self._rounds[number]


class PacedPush:
    """How much of a push has been read.

    Attributes:
        num_read: number of its chunks.
    """

    def __init__(self, pushes: _Round) -> None:
        self.num_read = 0
        self._pushes = pushes

    async def turn(self) -> None:
        """Returns once the push is at most `LEAD_CHUNKS` ahead of the slowest."""
        while self.num_read > self._pushes.slowest + LEAD_CHUNKS:
            await self._pushes.slowest_moved.wait()

    def read(self) -> None:
        """Counts a chunk."""
        self.num_read += 1
        self._pushes.moved(self.num_read - 1, self.num_read)


class _Round:
    """The pushes of a round that are under way: how many have read so many chunks."""

    def __init__(self) -> None:
        self.slowest = 0
        self.slowest_moved = asyncio.Event()
        self._pushes_at: Counter[int] = Counter()

    def __bool__(self) -> bool:
        return bool(self._pushes_at)

    def moved(self, before: int | None, after: int | None) -> None:
        """Notes that a push has read on; before it begins and after its end, that is None."""
        if before is not None:
            self._pushes_at[before] -= 1
            if not self._pushes_at[before]:
                del self._pushes_at[before]
        if after is not None:
            self._pushes_at[after] += 1
        if after == 0:
            self.slowest = 0
        elif self._pushes_at and self.slowest not in self._pushes_at:
            self.slowest = min(self._pushes_at)
            self.slowest_moved.set()
            self.slowest_moved = asyncio.Event()
