"""A client's links to all shards: what its pushes, fetches and commands have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from gradstream.errors import ClosedError, DeadlineError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.telemetry.traffic import LinkTraffic, Traffic, Transfer
from gradstream.telemetry.wait_attribution import Kind, WaitAttribution
from gradstream.transport.base import Endpoint
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap

__all__ = ["ShardLinks"]

RETRYABLE_CODES = frozenset({"STALE_EPOCH", "SUPERSEDED"})

T = TypeVar("T")


class ShardLinks:
    """All shards that have chunks, and how they are reached.

    Args:
        runtime: of the client's node.
        endpoint: of the client's node.
        shards: their node names, in the order of the chunk map.
        chunks: the chunk map.
        silence_s: how long a shard may be silent. One that waits for others is not silent.
        retry_s: how long an exchange is retried without any progress.
        on_transfer: told of each push and fetch that is done.

    Attributes:
        traffic: what has passed so far.
        claims: who kept this worker waiting.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        shards: Sequence[str],
        chunks: ChunkMap,
        *,
        silence_s: float,
        retry_s: float,
        on_transfer: Callable[[Transfer], None] | None,
    ) -> None:
        self.runtime = runtime
        self.endpoint = endpoint
        self.chunks = chunks
        self.silence_s = silence_s
        self.claims = WaitAttribution()
        self._shards = [(rank, name) for rank, name in enumerate(shards) if chunks.chunks_of(rank)]
        self.traffic = Traffic({name: LinkTraffic() for _, name in self._shards})
        self._retry_s = retry_s
        self._on_transfer = on_transfer
        self._jitter = runtime.random("retry")

    async def with_each(self, exchange: Callable[[int, str], Awaitable[T]]) -> list[T]:
        """The same with every shard, at once: its rank and its name go in. Results in the order of ranks.

        Raises:
            What the first one failed with; the others are cancelled then.
        """
        return await self.runtime.gather(*(exchange(rank, name) for rank, name in self._shards))

    async def retrying(self, attempt: Callable[[Callable[[], None]], Awaitable[T]]) -> T:
        """Tries until it works, or `retry_s` have passed since anything last did.

        Args:
            attempt: one try; calls what it is given whenever anything has come.

        Raises:
            PeerLostError, DeadlineError, ClosedError: what the last try failed with.
            RefusedError: likewise, or at once where another try would be refused too.
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
            except RefusedError as error:
                if error.code not in RETRYABLE_CODES:
                    raise
                failure = error
            self.traffic.retries += 1
            if self.runtime.left_s(last_ns, self._retry_s) < pause_s:
                raise failure
            await self.runtime.sleep(pause_s * (0.5 + self._jitter.random()))
            pause_s = min(1.0, 2 * pause_s)

    # ---- accounts -----------------------------------------------------------------------

    def heard(self, peer: str, opened_ns: int) -> None:
        """A shard, asked at `opened_ns`, has answered now."""
        self.claims.note(Kind.SHARD, peer, opened_ns, self.runtime.now())

    def claim(self, answer: v1.Chunk | v1.PushResult, opened_ns: int) -> None:
        """Notes for which worker an answer had to wait, if for any."""
        if answer.HasField("waited"):
            end_ns = opened_ns + 1000 * answer.waited.until_us
            self.claims.note(Kind.WORKER, answer.waited.on, opened_ns, end_ns)

    def report(self, kind: Literal["push", "fetch"], begun_ns: int, size_bytes: int) -> None:
        """A push or a fetch, begun at `begun_ns`, is done."""
        if self._on_transfer is not None:
            self._on_transfer(Transfer(kind, (self.runtime.now() - begun_ns) / 1e9, size_bytes))
