"""Decisions shared by all shards: each reports what it knows of a round or update, and the first shard decides.

    other shard ── what it says ──▶ first shard        first shard ── decision ──▶ all others

A number is that of a round or of an update, and there is one decision for each. Each other shard keeps one stream to
the first. When a stream breaks, the shard opens another. It then says again what is not decided, and the first shard
tells its last decision again. No older one can be missing if no worker pushes for a round before every chunk of every
shard has had the update of the previous round.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from google.protobuf.message import Message
from typing_extensions import override

from gradstream.errors import ClosedError, DeadlineError, PeerLostError, RefusedError
from gradstream.optim.base import Sums
from gradstream.optim.groups import Piece, add_up
from gradstream.runtime.base import Runtime, awaited_later
from gradstream.server.aggregation import rank_of
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.state import QuorumDecision
from gradstream.transport.base import Endpoint, Priority, Stream
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap

# ---- agreement ---------------------------------------------------------------------------

RETRY_S = 0.1

Said = TypeVar("Said", bound=Message)
Decision = TypeVar("Decision", bound=Message)


class ShardAgreement(ABC, Generic[Said, Decision]):
    """One shard's part in a sequence of decisions.

    Args:
        runtime, endpoint: of this shard's node.
        config: this shard's part of the run.
        shards: ranks of the shards that take part; the lowest is the first.

    Attributes:
        METHOD: name of the streams.
        SAID, DECISION: types of what a shard says, and of a decision.
    """

    METHOD: ClassVar[str]
    SAID: ClassVar[type[Any]]
    DECISION: ClassVar[type[Any]]

    def __init__(
        self, runtime: Runtime, endpoint: Endpoint, config: ShardConfig, shards: Collection[int]
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._config = config
        self._shards = shards
        self._first = f"shard-{min(shards)}"
        self._leads = config.rank == min(shards)
        self._queues: dict[asyncio.Queue[Message], None] = {}  # of the open streams
        self._said: list[Said] = []  # by this shard, and not decided
        self._heard: dict[
            int, dict[int, dict[int, Said]]
        ] = {}  # on the first shard: by number, shard, and `subject`
        self._newest: Decision | None = None
        self._decided = -1  # number of the newest decision
        if self._leads:
            endpoint.serve(self.METHOD, self._serve)

    # ---- what they agree on -------------------------------------------------------------

    @abstractmethod
    def number(self, message: Said | Decision) -> int:
        """The number that a message is about, from 0."""

    @abstractmethod
    def wrong(self, said: Said) -> str:
        """What is wrong with a message of another shard; "" if nothing is."""

    def subject(self, said: Said) -> int:
        """What of a number is said, where a shard says several things of it: the newest of each counts."""
        return 0

    @abstractmethod
    def decision(self, number: int, heard: Mapping[int, Mapping[int, Said]]) -> Decision | None:
        """On the first shard: decides, from what all shards have said of a number; None if it needs more."""

    @abstractmethod
    def decided(self, decision: Decision) -> None:
        """Takes each decision, once and in the order of numbers."""

    # ---- decisions ----------------------------------------------------------------------

    def say(self, said: Said) -> None:
        """Says something of a number that is not decided."""
        if self._leads:
            self.hear(self._config.rank, said)
            return
        self._said.append(said)
        self._send_all(said)

    def hear(self, shard: int, said: Said) -> None:
        """On the first shard: takes what a shard says, counts it once, and decides if that is enough."""
        number = self.number(said)
        if number <= self._decided:
            return
        heard = self._heard.setdefault(number, {})
        heard.setdefault(shard, {})[self.subject(said)] = said  # it may be said again, on a new stream
        decision = self.decision(number, heard) if len(heard) == len(self._shards) else None
        if decision is not None:
            self._send_all(decision)
            self.take(decision)

    def take(self, decision: Decision) -> None:
        """Takes a decision of the first shard, unless it is known."""
        number = self.number(decision)
        if number <= self._decided:
            return
        self._decided, self._newest = number, decision
        self._said = [one for one in self._said if self.number(one) > number]
        self._heard = {one: heard for one, heard in self._heard.items() if one > number}
        self.decided(decision)

    # ---- streams ------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the stream to the first shard open until cancelled; returns at once on the first shard."""
        while not self._leads:
            try:
                await self._exchange()
            except (PeerLostError, DeadlineError, ClosedError, RefusedError) as error:
                if isinstance(error, DeadlineError):
                    self._endpoint.redial(self._first, self._config.silence_s)
                await self._runtime.sleep(RETRY_S)  # the coordinator decides which nodes are lost

    async def _exchange(self) -> None:
        stream = await self._endpoint.open(self._first, self.METHOD, self.SAID(), priority=Priority.CONTROL)
        try:
            await self._converse(stream, self._said, self._receive_decisions(stream))
        finally:
            stream.cancel("done")

    async def _receive_decisions(self, stream: Stream) -> None:
        while (received := await stream.recv(self._config.silence_s)) is not None:
            self.take(self.DECISION.FromString(received.frame.body.data))
        raise ClosedError(f"{stream.peer} has ended its stream")

    async def _serve(self, stream: Stream) -> None:
        """On the first shard: hears another one."""
        shard = rank_of(stream.opened.sender)
        if shard not in self._shards or stream.opened.sender == self._first:
            expected = ", ".join(map(str, sorted(self._shards)[1:9])) or "none"
            raise self._bad(stream.peer, f"{self.METHOD} of shard {shard}; expected one of shards {expected}")
        newest = [] if self._newest is None else [self._newest]
        await self._converse(stream, newest, self._receive_said(stream, shard))

    async def _receive_said(self, stream: Stream, shard: int) -> None:
        while (received := await stream.recv()) is not None:
            said = self.SAID.FromString(received.frame.body.data)
            if wrong := self.wrong(said):
                raise self._bad(f"shard-{shard}", wrong)
            self.hear(shard, said)
        raise ClosedError(f"{stream.peer} has ended its stream")  # ends the sending half, too

    def _bad(self, peer: str, message: str) -> RefusedError:
        return RefusedError(self._first, "BAD_REQUEST", f"request of {peer}: {message}")

    async def _converse(self, stream: Stream, first: Iterable[Message], receiving: Awaitable[None]) -> None:
        """Sends these messages, and all that follow, while another task receives."""
        queue = asyncio.Queue[Message]()
        for message in first:
            queue.put_nowait(message)
        self._queues[queue] = None
        try:
            await self._runtime.gather(self._send(stream, queue), receiving)
        finally:
            del self._queues[queue]

    def _send_all(self, message: Message) -> None:
        for queue in self._queues:
            queue.put_nowait(message)

    async def _send(self, stream: Stream, queue: asyncio.Queue[Message]) -> None:
        every_s = self._config.waiting_every_s
        while True:
            try:
                message = await (queue.get() if queue.qsize() else self._runtime.within(every_s, queue.get()))
            except TimeoutError:
                await stream.waiting([])
                continue
            await stream.send(v1.Frame(body=v1.Body(data=message.SerializeToString())))


# ---- quorum ------------------------------------------------------------------------------
# A quorum: the first N pushes of a round that have arrived whole make its update, on every chunk.
#
# If each chunk chose its own first N pushes, they would come from other workers on every chunk; and if a worker died
# halfway, some chunks would have its push and others not. So a push counts once every shard has every chunk of it,
# and the first shard decides for all:
#
#     each shard     chunk parked ─▶ all chunks of (round, rank) there? ─▶ "whole" to the first shard
#     first shard    whole on all shards, N ranks? ─▶ decision (round, ranks) to all shards, once
#
# Before the decision the shards apply nothing of a round; at the decision they have all that they need, so a worker
# may die at any instant. A push that the decision leaves out is late, whenever it comes.
#
# Where weights depend on distances over the whole gradient (`server.aggregation.WholeRule`), all workers are needed.
# A shard that has all their pushes whole says its part of the distances, and the decision has the sums.
#
# Reference: Chen, Pan, Monga, Bengio, Józefowicz, "Revisiting Distributed Synchronous SGD", 2016 (backup workers).

MAX_ROUND = 1 << 53


class Quorum(ShardAgreement[v1.Whole, v1.Decision]):
    """One shard's part in the choice of the pushes of each round.

    Args:
        runtime, endpoint: of this shard's node.
        config: this shard's part of the run, with a quorum.
        chunks: the chunk map.
        on_decision: called with each decision, once and in the order of rounds.
        measure: measures the contributions of a round that have all arrived; None if distances do not matter.
    """

    METHOD: ClassVar[str] = "quorum"
    SAID = v1.Whole
    DECISION = v1.Decision

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        config: ShardConfig,
        chunks: ChunkMap,
        on_decision: Callable[[QuorumDecision], None],
        measure: Callable[[int], Awaitable[Sequence[float]]] | None = None,
    ) -> None:
        assert config.quorum is not None
        shards = config.first + min(config.num_shards, chunks.num_chunks)  # those that have chunks
        super().__init__(runtime, endpoint, config, range(config.first, shards))
        self._needed = config.quorum
        self._on_decision = on_decision
        self._measure = measure
        self._num_chunks = len(chunks.chunks_of(config.index))
        self._came: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # chunks, by round and rank

    def came(self, round: int, rank: int, chunk: int) -> None:  # noqa: A002  the word of the protocol
        """Counts a chunk of a push that has arrived on this shard."""
        if round <= self._decided:
            return
        chunks = self._came[round, rank]
        before = len(chunks)
        chunks.add(chunk)
        if not before < len(chunks) == self._num_chunks:
            return
        if self._measure is None:
            self.say(v1.Whole(rank=rank, round=round))
        elif self._num_whole(round) == self._needed:
            name = f"{self._runtime.node}-distances-{round}"
            awaited_later(self._runtime.spawn(self._say_distances(self._measure(round), round), name=name))

    def _num_whole(self, round: int) -> int:  # noqa: A002
        return sum(at == round and len(came) == self._num_chunks for (at, _), came in self._came.items())

    async def _say_distances(self, measuring: Awaitable[Sequence[float]], round: int) -> None:  # noqa: A002
        self.say(v1.Whole(round=round, distances=await measuring))

    @override
    def number(self, message: v1.Whole | v1.Decision) -> int:
        return message.round

    @override
    def wrong(self, said: v1.Whole) -> str:
        if said.round > MAX_ROUND or 0 < self._config.workers <= said.rank:
            expected = f"expected a round up to {MAX_ROUND} and a worker of this run"
            return f"a vote for round {said.round} of worker {said.rank}; {expected}"
        expected_distances = 0 if self._measure is None else (1 + self._needed) ** 2
        if len(said.distances) != expected_distances:
            return f"{len(said.distances)} distances between gradients; expected {expected_distances}"
        return ""

    def subject(self, said: v1.Whole) -> int:
        """See `ShardAgreement`: a vote is of one worker."""
        return said.rank if self._measure is None else 0

    @override
    def decision(self, number: int, heard: Mapping[int, Mapping[int, v1.Whole]]) -> v1.Decision | None:
        if self._measure is None:
            ranks = set.intersection(*(set(said) for said in heard.values()))
            return v1.Decision(round=number, ranks=sorted(ranks)) if len(ranks) == self._needed else None
        tables = [heard[shard][0].distances for shard in sorted(heard)]
        sums = [math.fsum(column) for column in zip(*tables, strict=True)]
        return v1.Decision(round=number, ranks=range(self._needed), distances=sums)

    @override
    def decided(self, decision: v1.Decision) -> None:
        for key in [key for key in self._came if key[0] <= decision.round]:
            del self._came[key]
        self._on_decision(QuorumDecision(decision.round, tuple(decision.ranks), tuple(decision.distances)))


# ---- tensor sums -------------------------------------------------------------------------
# Sums over each whole tensor, whose chunks lie on several shards: for update rules that are `PerTensor`.
#
#     each shard     chunk due ─▶ its sums ─▶ sums of all its chunks there? ─▶ to the first shard
#     first shard    sums of all shards there? ─▶ sums of each tensor, to all shards ─▶ every chunk is updated
#
# Update t of a chunk waits for the sums of update t of all chunks. So it is for rules alone under which update t of
# every chunk has the same contributions (`AggregationRule.by_round`). While a chunk waits, it can be read as it was
# before: a worker that takes a lost one's place reads all chunks, and then pushes what the others wait for.
#
# The sums of a chunk do not depend on the shard that has it, and the order in which they are added up changes no bit.
# So neither does the number of shards.


class TensorSums(ShardAgreement[v1.TensorSums, v1.TensorSums]):
    """One shard's part in the sums.

    Args:
        runtime, endpoint: of this shard's node.
        config: this shard's part of the run.
        num_chunks: number of chunks on this shard, at least 1.
        num_tensors: number of tensors of the unsplit model.
        shards: ranks of all shards that have chunks, of any part of the model.
    """

    METHOD: ClassVar[str] = "tensor-sums"
    SAID = v1.TensorSums
    DECISION = v1.TensorSums

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        config: ShardConfig,
        num_chunks: int,
        num_tensors: int,
        shards: Collection[int],
    ) -> None:
        super().__init__(runtime, endpoint, config, shards)
        self._num_chunks = num_chunks
        self._num_tensors = num_tensors
        self._pieces: dict[int, dict[int, Sequence[Piece]]] = {}  # by step and chunk
        self._totals: dict[
            int, asyncio.Future[Mapping[int, Sums]]
        ] = {}  # by step, while chunks wait for them
        self._waiting: dict[int, int] = {}  # by step: number of chunks that have not taken the total

    async def total(self, chunk: int, step: int, pieces: Sequence[Piece]) -> Mapping[int, Sums]:
        """The sums over each whole tensor in an update, once all chunks of all shards are due for it.

        Args:
            chunk: number of a chunk of this shard.
            step: number of the update, from 1.
            pieces: sums over the chunk.
        """
        if step not in self._totals:
            self._totals[step] = asyncio.get_running_loop().create_future()
            self._waiting[step] = self._num_chunks
        total = self._totals[step]
        of_step = self._pieces.setdefault(step, {})
        of_step[chunk] = pieces
        if len(of_step) == self._num_chunks:
            del self._pieces[step]
            self.say(_message(step, [piece for one in sorted(of_step) for piece in of_step[one]]))
        found = await asyncio.shield(total)
        self._waiting[step] -= 1
        if not self._waiting[step]:
            del self._totals[step], self._waiting[step]
        return found

    @override
    def number(self, message: v1.TensorSums) -> int:
        return message.step - 1

    @override
    def wrong(self, said: v1.TensorSums) -> str:
        fits = len(said.sums) == 2 * len(said.tensors)
        if fits and max(said.tensors, default=0) < self._num_tensors:
            return ""
        got = f"{len(said.sums)} sums of {len(said.tensors)} tensors"
        return f"{got}; expected two of each, of {self._num_tensors} at most"

    @override
    def decision(self, number: int, heard: Mapping[int, Mapping[int, v1.TensorSums]]) -> v1.TensorSums:
        total = add_up(piece for said in heard.values() for piece in _pieces(said[0]))
        return _message(number + 1, total.items())

    @override
    def decided(self, decision: v1.TensorSums) -> None:
        if decision.step in self._totals:
            self._totals[decision.step].set_result(dict(_pieces(decision)))


def _message(step: int, pieces: Iterable[Piece]) -> v1.TensorSums:
    pieces = list(pieces)
    tensors, sums = [tensor for tensor, _ in pieces], [one for _, pair in pieces for one in pair]
    return v1.TensorSums(step=step, tensors=tensors, sums=sums)


def _pieces(said: v1.TensorSums) -> list[Piece]:
    return list(zip(said.tensors, zip(said.sums[::2], said.sums[1::2], strict=True), strict=True))
