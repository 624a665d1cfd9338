"""A push that a shard receives: the chunks that wait for their update, and the results to be sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from gradstream.server.shard.instructions import Acknowledge, Sender
from gradstream.server.shard.row_store import Part
from gradstream.transport.base import Stream
from gradstream.wire import v1


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
        empty: chunks that the push left out, unless they were dropped.
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
