"""A fetch on the shard's side: which chunks can be sent, and which have to wait."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from gradstream.server.aggregation import rank_of
from gradstream.wire import v1

__all__ = ["PendingFetch"]


@dataclass(slots=True, eq=False)
class PendingFetch:
    """A fetch stream: the token of its chunks in the state machine.

    Args:
        reader: name of the node that fetches: a worker, or the shard itself.
        number: number of the fetch, from 1; 0 for one out of the worker's order, or of the shard itself.
        attempt: number of tries before this one.
        flushes: the fetch has sums applied, and so changes the state of chunks.
        opened_ns: when the reader began to wait.
        waiting: chunks that cannot be sent yet.

    Attributes:
        ready: chunks that can be sent, in this order, and which worker each had to wait for.
        over: the stream has ended; nothing is sent any more.
        wake: set when a chunk becomes ready.
    """

    reader: str
    number: int
    attempt: int
    flushes: bool
    opened_ns: int
    waiting: set[int]
    ready: deque[tuple[int, v1.Waited | None]] = field(default_factory=deque)
    over: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rank(self) -> int:
        """Rank of the reader."""
        return rank_of(self.reader)

    def release(self, chunk: int, waited: v1.Waited | None) -> None:
        """Makes a chunk ready: it is sent as it is then."""
        self.waiting.discard(chunk)
        self.ready.append((chunk, waited))
        self.wake.set()

    async def emptied(self) -> None:
        """Returns once no chunk has to wait."""
        while self.waiting:
            await self.wake.wait()
            self.wake.clear()
