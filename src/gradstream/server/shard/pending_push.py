"""A push, as a shard has it: what was pushed and is not used yet, and what its sender is to be told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gradstream.server.shard.row_store import Part
from gradstream.server.shard.state import Acknowledge
from gradstream.transport.base import Stream
from gradstream.wire import v1

__all__ = ["PendingPush"]


@dataclass(slots=True, eq=False)
class PendingPush:
    """A push stream: the token of its chunks in the state machine. It stays while any of them is parked.

    Args:
        stream: whose results these are.
        opened_ns: since when the sender waits.

    Attributes:
        parts: by chunk, what was pushed; of those that are absent nothing.
        pending: chunks that wait for a result.
        results: wait to be sent.
        absent: chunks of which nothing came, taken note of and not told yet.
        ended: the sender has said everything.
        wake: set where any of it has changed.
    """

    stream: Stream
    opened_ns: int
    parts: dict[int, Part] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    results: list[v1.PushResult] = field(default_factory=list)
    absent: set[int] = field(default_factory=set)
    ended: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def sender(self) -> str:
        """Node name of the worker that pushes."""
        return self.stream.opened.sender

    def took(self, chunk: int, part: Part | None) -> None:
        """A chunk is on its way to the state machine; None of what is absent."""
        if part is not None:
            self.parts[chunk] = part
        self.pending.add(chunk)

    def acknowledge(self, done: Acknowledge, waited: v1.Waited | None) -> None:
        """A chunk has its result: its elements are let go. Absent ones are told all at once, unless dropped.

        Args:
            done: what became of it.
            waited: for whom, if for anybody.
        """
        self.parts.pop(done.chunk, None)
        self.pending.discard(done.chunk)
        self.wake.set()
        if done.chunk in self.absent and done.outcome != "dropped":
            return
        self.absent.discard(done.chunk)
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

    def supersede(self, chunk: int) -> None:
        """A retry has taken the place of a chunk: nobody needs this stream any more."""
        self.parts.pop(chunk, None)
        self.stream.refuse(v1.SUPERSEDED, "a retry of this push has taken its place")
