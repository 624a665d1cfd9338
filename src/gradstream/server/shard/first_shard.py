"""Messages between the first of some shards and each other one, by which all of them decide the same.

    other shard ── say ──▶ first shard        first shard ── tell ──▶ all others

Each other shard keeps one stream to the first. When a stream breaks, the shard opens another. It then says again what
the first shard has not answered, and the first shard tells its last message again. No older message can be missing if
no worker pushes for a round before every chunk of every shard has had the update of the previous round.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import ClassVar, Protocol

from google.protobuf.message import Message

from gradstream.errors import ClosedError, DeadlineError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime, awaited_later
from gradstream.server.aggregation import rank_of
from gradstream.server.quorum import QuorumDecision, QuorumLeader, QuorumVotes
from gradstream.server.shard.config import ShardConfig
from gradstream.transport.base import Endpoint, Priority, Stream
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap

# ---- first shard -------------------------------------------------------------------------

RETRY_S = 0.1


class _SendQueue:
    """Messages for one stream, in order."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.wake = asyncio.Event()

    def put(self, message: Message) -> None:
        self.messages.append(message)
        self.wake.set()


class Speaker(Protocol):
    """What a shard says to the first one, and takes from it.

    Attributes:
        METHOD: name of the streams.
        OPENING: first message of a stream; only its type counts.
    """

    METHOD: ClassVar[str]
    OPENING: ClassVar[Message]

    def hear(self, shard: int, data: bytes) -> None:
        """On the first shard: takes what the shard of a rank says."""

    def follow(self, data: bytes) -> None:
        """On the others: takes what the first shard tells."""

    def unanswered(self) -> Iterable[Message]:
        """What this shard says again on a new stream."""


class FirstShardLink:
    """One shard's streams.

    Args:
        runtime: runtime of this shard's node.
        endpoint: endpoint of this shard's node.
        config: this shard's part of the run.
        shards: ranks of the shards that take part; the lowest is the first.
        speaker: what is said.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        config: ShardConfig,
        shards: Collection[int],
        speaker: Speaker,
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._config = config
        self._shards = shards
        self._first = f"shard-{min(shards)}"
        self._speaker = speaker
        self._queues: dict[_SendQueue, None] = {}  # of the open streams
        self._told: Message | None = None  # the first shard's last message
        self.leads = config.rank == min(shards)
        if self.leads:
            endpoint.serve(speaker.METHOD, self._serve)

    def say(self, message: Message) -> None:
        """Tells the first shard, from another one."""
        for queue in self._queues:
            queue.put(message)

    def tell(self, message: Message) -> None:
        """Tells all others, from the first shard."""
        self._told = message
        self.say(message)

    def bad(self, peer: str, message: str) -> RefusedError:
        """The error with which the first shard answers a message that cannot be."""
        return RefusedError(self._first, "BAD_REQUEST", f"request of {peer}: {message}")

    # ---- the first shard ----------------------------------------------------------------

    async def _serve(self, stream: Stream) -> None:
        queue, shard = _SendQueue(), rank_of(stream.opened.sender)
        if shard not in self._shards or stream.opened.sender == self._first:
            expected = ", ".join(map(str, sorted(self._shards)[1:9])) or "none"
            raise self.bad(
                stream.peer, f"{self._speaker.METHOD} of shard {shard}; expected one of shards {expected}"
            )
        self._queues[queue] = None
        if self._told is not None:
            queue.put(self._told)
        try:
            await self._runtime.gather(self._send(stream, queue), self._receive(stream, shard))
        finally:
            del self._queues[queue]

    async def _receive(self, stream: Stream, shard: int) -> None:
        while (received := await stream.recv()) is not None:
            self._speaker.hear(shard, received.frame.body.data)
        raise ClosedError(f"{stream.peer} has ended its stream")  # ends the sending half, too

    # ---- the others ---------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the stream to the first shard open until cancelled; returns at once on the first shard."""
        while not self.leads:
            try:
                await self._exchange()
            except (PeerLostError, DeadlineError, ClosedError, RefusedError) as error:
                if isinstance(error, DeadlineError):
                    self._endpoint.redial(self._first, self._config.silence_s)
                await self._runtime.sleep(RETRY_S)  # the coordinator decides which nodes are lost

    async def _exchange(self) -> None:
        stream = await self._endpoint.open(
            self._first, self._speaker.METHOD, self._speaker.OPENING, priority=Priority.CONTROL
        )
        queue = _SendQueue()
        for message in self._speaker.unanswered():
            queue.put(message)
        self._queues[queue] = None
        try:
            await self._runtime.gather(self._send(stream, queue), self._receive_told(stream))
        finally:
            del self._queues[queue]
            stream.cancel("done")

    async def _receive_told(self, stream: Stream) -> None:
        while (received := await stream.recv(self._config.silence_s)) is not None:
            self._speaker.follow(received.frame.body.data)
        raise ClosedError(f"{stream.peer} has ended its stream")

    # ---- both ---------------------------------------------------------------------------

    async def _send(self, stream: Stream, queue: _SendQueue) -> None:
        while True:
            while queue.messages:
                data = queue.messages.popleft().SerializeToString()
                await stream.send(v1.Frame(body=v1.Body(data=data)))
            queue.wake.clear()
            try:
                await self._runtime.within(self._config.waiting_every_s, queue.wake.wait())
            except TimeoutError:
                await stream.waiting([])


# ---- quorum agreement --------------------------------------------------------------------
# Has all shards agree on a quorum, by messages between `QuorumVotes` and `QuorumLeader`.
#
# The first shard leads; see `FirstShardLink`. Each other shard says which pushes have arrived whole, and follows the
# decisions.

MAX_ROUND = 1 << 53


class QuorumProtocol:
    """One shard's part in the agreement.

    Args:
        runtime: runtime of this shard's node.
        endpoint: endpoint of this shard's node.
        config: this shard's part of the run, with a quorum.
        chunks: the chunk map.
        decided: called with each decision, once and in the order of rounds.
        measure: measures the contributions of a round that have all arrived; None if distances do not matter.
    """

    METHOD: ClassVar[str] = "quorum"
    OPENING: ClassVar[Message] = v1.Whole()

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        config: ShardConfig,
        chunks: ChunkMap,
        decided: Callable[[QuorumDecision], None],
        measure: Callable[[int], Awaitable[Sequence[float]]] | None = None,
    ) -> None:
        assert config.quorum is not None
        self._runtime = runtime
        self._config = config
        self._decided = decided
        self._measure = measure
        self._measured: v1.Whole | None = None  # this shard's newest table
        num_shards = min(config.num_shards, chunks.num_chunks)  # those that have chunks
        self._votes = QuorumVotes(len(chunks.chunks_of(config.index)))
        self._leader = QuorumLeader(config.quorum, num_shards) if config.index == 0 else None
        self._last = -1  # round of the last decision
        self._link = FirstShardLink(runtime, endpoint, config, range(num_shards), self)
        self.run = self._link.run

    def came(self, round: int, rank: int, chunk: int) -> None:  # noqa: A002  the word of the protocol
        """Counts a chunk of a push that has arrived on this shard."""
        if not self._votes.came(round, rank, chunk):
            return
        if self._measure is None:
            self._whole(self._config.index, round, rank)
        elif sum(one == round for one, _ in self._votes.whole) == self._config.quorum:
            name = f"{self._runtime.node}-distances-{round}"
            awaited_later(self._runtime.spawn(self._tell_distances(self._measure(round), round), name=name))

    async def _tell_distances(self, measuring: Awaitable[Sequence[float]], round: int) -> None:  # noqa: A002
        distances = await measuring
        self._measured = v1.Whole(round=round, distances=distances)
        if self._leader is None:
            self._link.say(self._measured)
        else:
            self._publish(self._leader.measured(self._config.index, round, distances))

    def _whole(self, shard: int, round: int, rank: int) -> None:  # noqa: A002
        if self._leader is None:
            self._link.say(v1.Whole(rank=rank, round=round))
            return
        self._publish(self._leader.whole(shard, round, rank))

    def _publish(self, decision: QuorumDecision | None) -> None:
        """Tells all shards the first shard's decision, if there is one."""
        if decision is not None:
            self._link.tell(
                v1.Decision(round=decision.round, ranks=decision.ranks, distances=decision.distances)
            )
            self._decide(decision)

    def _decide(self, decision: QuorumDecision) -> None:
        if decision.round > self._last:
            self._last = decision.round
            self._votes.decided(decision)
            self._decided(decision)

    # ---- the first shard ----------------------------------------------------------------

    def hear(self, shard: int, data: bytes) -> None:
        """See `Speaker`."""
        said = v1.Whole.FromString(data)
        if said.round > MAX_ROUND or 0 < self._config.workers <= said.rank:
            expected = f"expected a round up to {MAX_ROUND} and a worker of this run"
            got = f"a vote for round {said.round} of worker {said.rank}"
            raise self._link.bad(f"shard-{shard}", f"{got}; {expected}")
        if self._measure is None:
            self._whole(shard, said.round, said.rank)
        elif said.distances:  # the first message has none
            self._take_distances(shard, said)

    def _take_distances(self, shard: int, said: v1.Whole) -> None:
        assert self._leader is not None and self._config.quorum is not None
        expected = (1 + self._config.quorum) ** 2
        if len(said.distances) != expected:
            got = f"{len(said.distances)} distances between gradients"
            raise self._link.bad(f"shard-{shard}", f"{got}; expected {expected}")
        self._publish(self._leader.measured(shard, said.round, said.distances))

    # ---- the others ---------------------------------------------------------------------

    def unanswered(self) -> Iterable[v1.Whole]:
        """See `Speaker`."""
        if self._measure is None:
            return [v1.Whole(rank=rank, round=round_) for round_, rank in self._votes.whole]
        return [self._measured] if self._measured is not None and self._measured.round > self._last else []

    def follow(self, data: bytes) -> None:
        """See `Speaker`."""
        said = v1.Decision.FromString(data)
        self._decide(QuorumDecision(said.round, tuple(said.ranks), tuple(said.distances)))
