"""Has all shards agree on a quorum, by messages between `QuorumVotes` and `QuorumLeader`.

The first shard serves "quorum". Each other shard keeps one stream to it. On that stream it sends which pushes have
arrived whole, and receives the decisions. When a stream breaks, the shard opens another: it sends all undecided
pushes again, and the first shard sends its last decision again. No older decision can be missing, since no worker
pushes for a round before every chunk of every shard has had the update of the previous round.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from gradstream.errors import ClosedError, DeadlineError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime, awaited_later
from gradstream.server.aggregation import rank_of
from gradstream.server.quorum import QuorumDecision, QuorumLeader, QuorumVotes
from gradstream.server.shard.config import ShardConfig
from gradstream.transport.base import Endpoint, Priority, Stream
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap

FIRST = "shard-0"
RETRY_S = 0.1
MAX_ROUND = 1 << 53


class _SendQueue:
    """Messages for one stream, in order."""

    def __init__(self) -> None:
        self.messages: deque[v1.Whole | v1.Verdict] = deque()
        self.wake = asyncio.Event()

    def put(self, message: v1.Whole | v1.Verdict) -> None:
        self.messages.append(message)
        self.wake.set()


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
        self._endpoint = endpoint
        self._config = config
        self._num_shards = min(config.num_shards, chunks.num_chunks)  # those that have chunks
        self._decided = decided
        self._measure = measure
        self._measured: v1.Whole | None = None  # this shard's newest table
        self._votes = QuorumVotes(len(chunks.chunks_of(config.index)))
        self._leader = QuorumLeader(config.quorum, self._num_shards) if config.index == 0 else None
        self._queues: dict[_SendQueue, None] = {}  # of the open streams
        self._last = -1  # round of the last decision
        if self._leader is not None:
            endpoint.serve("quorum", self._serve)

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
            for queue in self._queues:
                queue.put(self._measured)
        else:
            self._publish(self._leader.measured(self._config.index, round, distances))

    def _whole(self, shard: int, round: int, rank: int) -> None:  # noqa: A002
        if self._leader is None:
            for queue in self._queues:
                queue.put(v1.Whole(rank=rank, round=round))
            return
        self._publish(self._leader.whole(shard, round, rank))

    def _publish(self, decision: QuorumDecision | None) -> None:
        """Tells all shards the first shard's decision, if there is one."""
        if decision is not None:
            for queue in self._queues:
                queue.put(_message(decision))
            self._decide(decision)

    def _decide(self, decision: QuorumDecision) -> None:
        if decision.round > self._last:
            self._last = decision.round
            self._votes.decided(decision)
            self._decided(decision)

    # ---- the first shard ----------------------------------------------------------------

    async def _serve(self, stream: Stream) -> None:
        assert self._leader is not None
        queue, shard = _SendQueue(), rank_of(stream.opened.sender)
        if not 0 < shard < self._num_shards:
            raise self._bad(stream.peer, f"a vote; expected votes of shards 1 to {self._num_shards - 1}")
        self._queues[queue] = None
        if self._leader.last is not None:
            queue.put(_message(self._leader.last))
        try:
            await self._runtime.gather(self._send(stream, queue), self._receive_votes(stream, shard))
        finally:
            del self._queues[queue]

    async def _receive_votes(self, stream: Stream, shard: int) -> None:
        while (received := await stream.recv()) is not None:
            said = v1.Whole.FromString(received.frame.body.data)
            if said.round > MAX_ROUND or 0 < self._config.workers <= said.rank:
                raise self._bad(
                    stream.peer,
                    f"a vote for round {said.round} of worker {said.rank}; expected a round up to {MAX_ROUND} "
                    "and a worker of this run",
                )
            if self._measure is None:
                self._whole(shard, said.round, said.rank)
            elif said.distances:  # the first message has none
                self._take_distances(shard, said)
        raise ClosedError(f"{stream.peer} has ended its stream")  # ends the sending half, too

    def _take_distances(self, shard: int, said: v1.Whole) -> None:
        assert self._leader is not None and self._config.quorum is not None
        expected = (1 + self._config.quorum) ** 2
        if len(said.distances) != expected:
            raise self._bad(
                f"shard-{shard}", f"{len(said.distances)} distances between gradients; expected {expected}"
            )
        self._publish(self._leader.measured(shard, said.round, said.distances))

    def _bad(self, peer: str, message: str) -> RefusedError:
        return RefusedError(FIRST, "BAD_REQUEST", f"request of {peer}: {message}")

    # ---- the others ---------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the stream to the first shard open until cancelled; returns at once on the first shard."""
        while self._leader is None:
            try:
                await self._exchange()
            except (PeerLostError, DeadlineError, ClosedError, RefusedError) as error:
                if isinstance(error, DeadlineError):
                    self._endpoint.redial(FIRST, self._config.silence_s)
                await self._runtime.sleep(RETRY_S)  # the coordinator decides which nodes are lost

    async def _exchange(self) -> None:
        stream = await self._endpoint.open(FIRST, "quorum", v1.Whole(), priority=Priority.CONTROL)
        queue = _SendQueue()
        if self._measure is None:
            for round_, rank in self._votes.whole:
                queue.put(v1.Whole(rank=rank, round=round_))
        elif self._measured is not None and self._measured.round > self._last:
            queue.put(self._measured)
        self._queues[queue] = None
        try:
            await self._runtime.gather(self._send(stream, queue), self._receive_decisions(stream))
        finally:
            del self._queues[queue]
            stream.cancel("done")

    async def _receive_decisions(self, stream: Stream) -> None:
        while (received := await stream.recv(self._config.silence_s)) is not None:
            said = v1.Verdict.FromString(received.frame.body.data)
            self._decide(QuorumDecision(said.round, tuple(said.ranks), tuple(said.distances)))
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


def _message(decision: QuorumDecision) -> v1.Verdict:
    return v1.Verdict(round=decision.round, ranks=decision.ranks, distances=decision.distances)
