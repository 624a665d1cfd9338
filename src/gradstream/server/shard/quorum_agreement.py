"""Shards that agree on a quorum: thin I/O around `QuorumVotes` and `QuorumLeader`.

The first shard serves "quorum"; each other one keeps one stream to it, says what it holds whole, and
hears the verdicts. A stream that breaks is opened again: what is not decided is said again, and the last
verdict is heard again. Older ones cannot have been missed: nobody contributes to a round before every
chunk of every shard has had the update of the one before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from gradstream.errors import ClosedError, DeadlineError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import rank_of
from gradstream.server.quorum import QuorumDecision, QuorumLeader, QuorumVotes
from gradstream.transport.base import Endpoint, Priority, Stream
from gradstream.wire import v1

__all__ = ["QuorumProtocol"]

FIRST = "shard-0"
RETRY_S = 0.1
MAX_ROUND = 1 << 53


class _Outbox:
    """Messages for one stream, in order."""

    def __init__(self) -> None:
        self.messages: deque[v1.Whole | v1.Verdict] = deque()
        self.wake = asyncio.Event()

    def put(self, message: v1.Whole | v1.Verdict) -> None:
        self.messages.append(message)
        self.wake.set()


class QuorumProtocol:
    """One shard's part in it.

    Args:
        runtime, endpoint: of this shard.
        rank: of this shard.
        needed: N contributions make an update.
        num_chunks: on this shard.
        num_shards: how many shards have chunks.
        workers: how many there are; 0 where nobody has said.
        waiting_every_s: how often a shard that must wait is told so.
        decided: called with each verdict, once and in the order of rounds.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        *,
        rank: int,
        needed: int,
        num_chunks: int,
        num_shards: int,
        workers: int = 0,
        waiting_every_s: float,
        decided: Callable[[QuorumDecision], None],
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._rank = rank
        self._num_shards = num_shards
        self._workers = workers
        self._every_s = waiting_every_s
        self._decided = decided
        self._tally = QuorumVotes(num_chunks)
        self._judge = QuorumLeader(needed, num_shards) if rank == 0 else None
        self._outboxes: dict[_Outbox, None] = {}  # of the streams that are open
        self._last = -1  # round of the last verdict
        if self._judge is not None:
            endpoint.serve("quorum", self._serve)

    def came(self, round: int, rank: int, chunk: int) -> None:  # noqa: A002  the word of the protocol
        """A chunk of a contribution is on this shard."""
        if self._tally.came(round, rank, chunk):
            self._whole(self._rank, round, rank)

    def _whole(self, shard: int, round: int, rank: int) -> None:  # noqa: A002
        if self._judge is None:
            for outbox in self._outboxes:
                outbox.put(v1.Whole(rank=rank, round=round))
            return
        verdict = self._judge.whole(shard, round, rank)
        if verdict is not None:
            for outbox in self._outboxes:
                outbox.put(_told(verdict))
            self._decide(verdict)

    def _decide(self, verdict: QuorumDecision) -> None:
        if verdict.round > self._last:
            self._last = verdict.round
            self._tally.decided(verdict)
            self._decided(verdict)

    # ---- the first shard ----------------------------------------------------------------

    async def _serve(self, stream: Stream) -> None:
        assert self._judge is not None
        outbox, shard = _Outbox(), rank_of(stream.opened.sender)
        if not 0 < shard < self._num_shards:
            raise self._bad(
                stream.peer, f"there are {self._num_shards} shards with chunks, and this is the first"
            )
        self._outboxes[outbox] = None
        if self._judge.last is not None:
            outbox.put(_told(self._judge.last))
        try:
            await self._runtime.gather(self._send(stream, outbox), self._hear_wholes(stream, shard))
        finally:
            del self._outboxes[outbox]

    async def _hear_wholes(self, stream: Stream, shard: int) -> None:
        while (received := await stream.recv()) is not None:
            said = v1.Whole.FromString(received.frame.body.data)
            if said.round > MAX_ROUND or (self._workers and said.rank >= self._workers):
                raise self._bad(stream.peer, f"round {said.round} of rank {said.rank}, which there is not")
            self._whole(shard, said.round, said.rank)
        raise ClosedError(f"{stream.peer} has ended its stream")  # ends the other half too

    def _bad(self, who: str, message: str) -> RefusedError:
        return RefusedError(FIRST, "BAD_REQUEST", f"request of {who}: {message}")

    # ---- the others ---------------------------------------------------------------------

    async def run(self, silence_s: float) -> None:
        """Keeps the stream to the first shard, for as long as it is not cancelled."""
        while self._judge is None:
            try:
                await self._converse(silence_s)
            except (PeerLostError, DeadlineError, ClosedError, RefusedError):
                await self._runtime.sleep(RETRY_S)  # membership judges who is lost

    async def _converse(self, silence_s: float) -> None:
        stream = await self._endpoint.open(FIRST, "quorum", v1.Whole(), priority=Priority.CONTROL)
        outbox = _Outbox()
        for round_, rank in self._tally.whole:
            outbox.put(v1.Whole(rank=rank, round=round_))
        self._outboxes[outbox] = None
        try:
            await self._runtime.gather(self._send(stream, outbox), self._hear_verdicts(stream, silence_s))
        finally:
            del self._outboxes[outbox]
            stream.cancel("done")

    async def _hear_verdicts(self, stream: Stream, silence_s: float) -> None:
        while (received := await stream.recv(silence_s)) is not None:
            said = v1.Verdict.FromString(received.frame.body.data)
            self._decide(QuorumDecision(said.round, tuple(said.ranks)))
        raise ClosedError(f"{stream.peer} has ended its stream")

    # ---- both ---------------------------------------------------------------------------

    async def _send(self, stream: Stream, outbox: _Outbox) -> None:
        while True:
            while outbox.messages:
                data = outbox.messages.popleft().SerializeToString()
                await stream.send(v1.Frame(body=v1.Body(data=data)))
            outbox.wake.clear()
            try:
                await self._runtime.within(self._every_s, outbox.wake.wait())
            except TimeoutError:
                await stream.waiting([])


def _told(verdict: QuorumDecision) -> v1.Verdict:
    return v1.Verdict(round=verdict.round, ranks=verdict.ranks)
