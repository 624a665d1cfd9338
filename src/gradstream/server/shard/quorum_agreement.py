"""Has all shards agree on a quorum, by messages between `QuorumVotes` and `QuorumLeader`.

The first shard leads; see `FirstShardLink`. Each other shard says which pushes have arrived whole, and follows the
decisions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import ClassVar

from google.protobuf.message import Message

from gradstream.runtime.base import Runtime, awaited_later
from gradstream.server.quorum import QuorumDecision, QuorumLeader, QuorumVotes
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.first_shard import FirstShardLink
from gradstream.transport.base import Endpoint
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap

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
                v1.Verdict(round=decision.round, ranks=decision.ranks, distances=decision.distances)
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
        said = v1.Verdict.FromString(data)
        self._decide(QuorumDecision(said.round, tuple(said.ranks), tuple(said.distances)))
