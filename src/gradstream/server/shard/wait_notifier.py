"""News for who waits at a shard. While there are none, the peer is told for whom it waits, or it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from gradstream.runtime.base import Runtime
from gradstream.transport.base import Stream

__all__ = ["WaitNotifier"]


class WaitNotifier:
    """News of the chunks that a stream waits for.

    Args:
        runtime: of the shard's node.
        every_s: how often the peer is told meanwhile.
        awaited: for whom chunks wait, and a reader that asks for this clock.
    """

    def __init__(
        self, runtime: Runtime, every_s: float, awaited: Callable[[Iterable[int], int], Sequence[str]]
    ) -> None:
        self._runtime = runtime
        self._every_s = every_s
        self._awaited = awaited

    async def of(
        self, stream: Stream, wake: asyncio.Event, chunks: Iterable[int], min_clock: int = 0
    ) -> bool:
        """Waits for `wake`, and clears it; where it is not set in time, tells the peer and returns False."""
        try:
            await self._runtime.within(self._every_s, wake.wait())
        except TimeoutError:
            await stream.waiting(list(self._awaited(sorted(chunks), min_clock)))
            return False
        wake.clear()
        return True
