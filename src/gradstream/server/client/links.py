"""A client's links to all shards, which its pushes, fetches and commands share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Literal, TypeVar

from gradstream.errors import ClosedError, DeadlineError, GradstreamError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.telemetry.meters import Kind, LinkTraffic, Traffic, Transfer, WaitAttribution
from gradstream.transport.base import Endpoint
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap, Placement

RETRYABLE_CODES = frozenset({"STALE_EPOCH", "SUPERSEDED"})

MOST_PAUSE_S = 0.2
"""The longest pause between two tries, in seconds: a shard that was killed is back within a second."""

T = TypeVar("T")


class ShardLinks:
    """Reaches all shards that have chunks, retries exchanges with them, and counts the traffic.

    If other shards replace them, an exchange in progress continues there with the remaining chunks.

    Args:
        runtime: runtime of the client's node.
        endpoint: endpoint of the client's node.
        placement: the shards.
        chunks: the chunk map; only its bounds are used.
        deadlines: `silence_s`, after which a shard counts as silent and the exchange is tried again (a shard that
            waits for others is not silent), and `retry_s`, after which an exchange without any progress raises.
        on_transfer: called with each push and fetch that is done.

    Attributes:
        traffic: the exchanges so far.
        claims: time that this worker waited, by the node that it waited for.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        placement: Placement,
        chunks: ChunkMap,
        deadlines: Deadlines,
        on_transfer: Callable[[Transfer], None] | None = None,
    ) -> None:
        self.runtime = runtime
        self.endpoint = endpoint
        self.chunks = chunks
        self.silence_s = deadlines.silence_s
        self.claims = WaitAttribution()
        self.traffic = Traffic()
        self._place(placement)
        self._retry_s = deadlines.retry_s
        self._on_transfer = on_transfer
        self._jitter = runtime.random("retry")

    def _place(self, placement: Placement) -> None:
        self._placement = placement
        self._moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parts = placement.divided(range(self.chunks.num_chunks))
        for name in self._parts:
            self.traffic.links.setdefault(name, LinkTraffic())

    def move(self, placement: Placement) -> None:
        """Switches to the shards that hold the parameters now."""
        if placement != self._placement:
            moved = self._moved
            self._place(placement)
            moved.set_result(None)

    async def with_each(self, ask: Callable[[str], Awaitable[T]]) -> list[T]:
        """Asks every shard, all at once. Returns results in the order of the shards.

        Raises:
            The first error of any; the other requests are cancelled then.
        """
        while True:
            results = await self._until_moved([ask(name) for name in self._parts])
            if results is not None:
                return results

    async def with_chunks(
        self, exchange: Callable[[str, dict[int, None]], Awaitable[None]], chunks: Iterable[int]
    ) -> None:
        """Exchanges each of these chunks with the shard that holds it, with all shards at once.

        Args:
            exchange: exchanges chunks with one shard: gets its name and its chunks, and removes each that is done.
            chunks: numbers of the chunks.

        Raises:
            The first error of any; the other exchanges are cancelled then.
        """
        left = chunks
        while parts := self._placement.divided(left):
            await self._until_moved([exchange(name, part) for name, part in parts.items()])
            left = [chunk for part in parts.values() for chunk in part]

    async def _until_moved(self, works: list[Awaitable[T]]) -> list[T] | None:
        """Awaits all; cancels them and returns None if other shards hold the parameters meanwhile."""
        moved = self._moved
        working = asyncio.ensure_future(self.runtime.gather(*works))

        def cancel(_: asyncio.Future[None]) -> None:
            working.cancel()

        moved.add_done_callback(cancel)
        try:
            return await working
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not moved.done() or (task is not None and task.cancelling()):
                raise
        except GradstreamError:  # the shard that was asked has left
            if not moved.done():
                raise
        finally:
            moved.remove_done_callback(cancel)
        return None

    async def retrying(self, attempt: Callable[[Callable[[], None]], Awaitable[T]]) -> T:
        """Tries until an attempt succeeds, or until `retry_s` have passed since the last progress.

        After a silent attempt, the next one takes a new connection.

        Args:
            attempt: makes one attempt. It gets a function, which it calls at each progress.

        Raises:
            PeerLostError, DeadlineError, ClosedError: the last attempt failed with it.
            RefusedError: the last attempt failed with it; raised at once where the shard would refuse again.
        """
        last_ns, pause_s = self.runtime.now(), 0.02

        def progressed() -> None:
            nonlocal last_ns, pause_s
            last_ns, pause_s = self.runtime.now(), 0.02

        while True:
            try:
                return await attempt(progressed)
            except (PeerLostError, DeadlineError, ClosedError) as error:
                failure: Exception = error
                if isinstance(error, DeadlineError):
                    self.endpoint.redial(error.peer, self.silence_s)
            except RefusedError as error:
                if error.code not in RETRYABLE_CODES:
                    raise
                failure = error
            self.traffic.retries += 1
            if self.runtime.left_s(last_ns, self._retry_s) < pause_s:
                raise failure
            await self.runtime.sleep(pause_s * (0.5 + self._jitter.random()))
            pause_s = min(MOST_PAUSE_S, 2 * pause_s)

    # ---- accounts -----------------------------------------------------------------------

    def heard(self, peer: str, opened_ns: int) -> None:
        """Notes that a shard has just answered a stream opened at `opened_ns`."""
        self.claims.note(Kind.SHARD, peer, opened_ns, self.runtime.now())

    def claim(self, answer: v1.Chunk | v1.PushResult, opened_ns: int) -> None:
        """Notes which worker an answer had to wait for, if any."""
        if answer.HasField("waited"):
            end_ns = opened_ns + 1000 * answer.waited.until_us
            self.claims.note(Kind.WORKER, answer.waited.on, opened_ns, end_ns)

    def report(self, kind: Literal["push", "fetch"], begun_ns: int, size_bytes: int) -> None:
        """Reports that a push or a fetch, begun at `begun_ns`, is done."""
        if self._on_transfer is not None:
            self._on_transfer(Transfer(kind, (self.runtime.now() - begun_ns) / 1e9, size_bytes))
