"""A fetch on the shard's side: the chunks that are ready, and those that wait."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from gradstream.server.aggregation import rank_of
from gradstream.wire import v1


@dataclass(slots=True, eq=False)
class PendingFetch:
    """A fetch stream. In the state machine it is the token of its chunks.

    Args:
        reader: name of the node that fetches: a worker, or the shard itself.
        number: number of the fetch, from 1; 0 for a fetch of the shard itself, or out of the worker's order.
        attempt: number of earlier attempts.
        flushes: whether the fetch has sums applied, and so changes the state of chunks.
        opened_ns: time at which the reader began to wait, in ns.
        waiting: chunks that the shard cannot send yet.

    Attributes:
        ready: chunks that the shard can send, in this order, with the worker that each had to wait for.
        over: whether the stream has ended.
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
        """Marks a chunk as ready."""
        self.waiting.discard(chunk)
        self.ready.append((chunk, waited))
        self.wake.set()

    async def emptied(self) -> None:
        """Returns once no chunk waits."""
        while self.waiting:
            await self.wake.wait()
            self.wake.clear()
