"""A fetch, as a shard has it: which chunks may be sent, and which have to wait."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from gradstream.server.shard.event_schedule import Fetched
from gradstream.wire import v1

__all__ = ["PendingFetch"]


@dataclass(slots=True, eq=False)
class PendingFetch:
    """A fetch stream: the token of its chunks in the state machine.

    Args:
        reader: node name of who fetches: a worker, or the shard itself.
        fetched: the fetch, as far as the order of things is concerned.
        opened_ns: since when the reader waits.
        waiting: chunks that cannot be sent yet.

    Attributes:
        ready: chunks that can be, in this order, and whom each had to wait for.
        over: nobody reads any more.
        wake: set when a chunk is ready.
    """

    reader: str
    fetched: Fetched
    opened_ns: int
    waiting: set[int]
    ready: deque[tuple[int, v1.Waited | None]] = field(default_factory=deque)
    over: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self, chunk: int, waited: v1.Waited | None) -> None:
        """A chunk can be sent, as it is when that is done."""
        self.waiting.discard(chunk)
        self.ready.append((chunk, waited))
        self.wake.set()

    async def emptied(self) -> None:
        """Returns once no chunk has to wait."""
        while self.waiting:
            await self.wake.wait()
            self.wake.clear()
