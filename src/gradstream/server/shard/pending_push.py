"""A push that a shard receives: the chunks that wait for their update, and the results to be sent."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import rank_of
from gradstream.server.rows import Part
from gradstream.server.shard.state import Acknowledge, Sender, ShardState
from gradstream.transport.base import Stream
from gradstream.wire import v1

# ---- pending push ------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class PendingPush:
    """One push of a worker to this shard. The shard's state machine refers to it while one of its chunks is parked.

    Args:
        stream: stream to the sender.
        opened_ns: time at which the sender began to wait, in ns.
        waiting: number of chunks of each sender's pushes without a result; this push counts its own there.

    Attributes:
        parts: content of each chunk; empty chunks have none.
        pending: chunks that wait for a result.
        results: results that wait to be sent.
        empty: chunks that the push skipped, unless they were dropped.
        ended: whether the sender has sent everything.
        wake: set when any of these changes.
    """

    stream: Stream
    opened_ns: int
    waiting: Counter[Sender] = field(default_factory=Counter)
    parts: dict[int, Part] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    results: list[v1.PushResult] = field(default_factory=list)
    empty: set[int] = field(default_factory=set)
    ended: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def sender(self) -> str:
        """Node name of the worker that pushes."""
        return self.stream.opened.sender

    @property
    def key(self) -> Sender:
        """Name and incarnation of that worker."""
        return self.stream.opened.sender, self.stream.opened.incarnation

    def took(self, chunk: int, part: Part | None) -> None:
        """Adds a chunk that was received; the part of an empty chunk is None."""
        if part is not None:
            self.parts[chunk] = part
        self.pending.add(chunk)
        self.waiting[self.key] += 1

    def _free(self, chunk: int) -> None:
        """Frees a chunk that waits no more."""
        self.parts.pop(chunk, None)
        if chunk in self.pending:
            self.pending.discard(chunk)
            self.waiting[self.key] -= 1

    def acknowledge(self, done: Acknowledge, waited: v1.Waited | None) -> None:
        """Frees a chunk's elements and queues its result. Empty chunks share one result, unless they were dropped.

        Args:
            done: the outcome of the chunk.
            waited: the worker that the chunk's update waited for; None if it waited for no worker.
        """
        self._free(done.chunk)
        self.wake.set()
        if done.chunk in self.empty and done.outcome != "dropped":
            return
        self.empty.discard(done.chunk)
        self.results.append(
            v1.PushResult(
                chunk=done.chunk,
                sequence=done.sequence,
                outcome=done.outcome.upper(),
                version=done.version,
                staleness=max(0, done.staleness),
                waited=waited,
            )
        )

    def supersede(self, chunk: int, retry: PendingPush) -> None:
        """Ends this push after the sender has sent a chunk again in a retry, whose stream replaces this one.

        The elements stay those of the first copy: what was measured is what is applied.
        """
        retry.parts.pop(chunk, None)
        if chunk in self.parts:
            retry.parts[chunk] = self.parts[chunk]
        self._free(chunk)
        self.stream.refuse(v1.SUPERSEDED, "a retry of this push has taken its place")


# ---- pending fetch -----------------------------------------------------------------------
# A fetch on the shard's side: the chunks that are ready, and those that wait.


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


# ---- wait notifier -----------------------------------------------------------------------
# Tells a peer that waits at a shard which nodes it waits for, so that the peer does not give up.


@dataclass(eq=False)
class WaitNotifier:
    """Waits until chunks are ready, and meanwhile tells the peer, over and over, which nodes they wait for.

    Args:
        runtime: runtime of the shard's node.
        every_s: seconds between two messages to a peer that waits.
        state: knows which nodes a chunk waits for.
    """

    runtime: Runtime
    every_s: float
    state: ShardState

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
            await self.runtime.within(self.every_s, wake.wait())
        except TimeoutError:
            if waited := sorted(chunks):
                await stream.waiting(self.state.awaited(waited, min_clock))
            return False
        wake.clear()
        return True
