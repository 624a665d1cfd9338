"""Tells a peer that waits at a shard for whom it waits, so that it does not give up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from gradstream.runtime.base import Runtime
from gradstream.transport.base import Stream

__all__ = ["WaitNotifier"]


class WaitNotifier:
    """Waits for chunks on behalf of a stream, and keeps its peer informed.

    Args:
        runtime: runtime of the shard's node.
        every_s: seconds between two messages to a peer that waits.
        awaited: gives the names of the nodes that chunks wait for, from the chunks and the clock that a reader
            asks for.
    """

    def __init__(
        self, runtime: Runtime, every_s: float, awaited: Callable[[Iterable[int], int], Sequence[str]]
    ) -> None:
        self._runtime = runtime
        self._every_s = every_s
        self._awaited = awaited

    async def wait(
        self, stream: Stream, wake: asyncio.Event, chunks: Iterable[int], min_clock: int = 0
    ) -> bool:
        """Waits for `wake` and clears it. If it is not set in time, tells the peer and returns False."""
        try:
            await self._runtime.within(self._every_s, wake.wait())
        except TimeoutError:
            await stream.waiting(list(self._awaited(sorted(chunks), min_clock)))
            return False
        wake.clear()
        return True
