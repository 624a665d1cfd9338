"""Tells a peer that waits at a shard which nodes it waits for, so that the peer does not give up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gradstream.runtime.base import Runtime
from gradstream.server.shard.state import ShardState
from gradstream.transport.base import Stream


class WaitNotifier:
    """Waits until chunks are ready, and meanwhile tells the peer, over and over, which nodes they wait for.

    Args:
        runtime: runtime of the shard's node.
        every_s: seconds between two messages to a peer that waits.
        state: knows which nodes a chunk waits for.
    """

    def __init__(self, runtime: Runtime, every_s: float, state: ShardState) -> None:
        self._runtime = runtime
        self._every_s = every_s
        self._state = state

    async def wait(
        self, stream: Stream, wake: asyncio.Event, chunks: Iterable[int], min_clock: int = 0
    ) -> bool:
        """Waits for `wake` and clears it. If it is not set in time, tells the peer and returns False.

        A peer that waits for no chunk is told nothing: the shard waits for the peer then. What the peer has sent may be
        lost, and it sends it again only if the shard is silent.

        Args:
            stream: stream to the peer.
            wake: set when one of the chunks is ready.
            chunks: the chunks that the peer waits for.
            min_clock: clock that the peer asks for.
        """
        try:
            await self._runtime.within(self._every_s, wake.wait())
        except TimeoutError:
            if waited := sorted(chunks):
                await stream.waiting(self._state.awaited(waited, min_clock))
            return False
        wake.clear()
        return True
