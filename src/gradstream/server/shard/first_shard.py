"""Messages between the first of some shards and each other one, by which all of them decide the same.

    other shard ── say ──▶ first shard        first shard ── tell ──▶ all others

Each other shard keeps one stream to the first. When a stream breaks, the shard opens another. It then says again what
the first shard has not answered, and the first shard tells its last message again. No older message can be missing if
no worker pushes for a round before every chunk of every shard has had the update of the previous round.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable
from typing import ClassVar, Protocol

from google.protobuf.message import Message

from gradstream.errors import ClosedError, DeadlineError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import rank_of
from gradstream.server.shard.config import ShardConfig
from gradstream.transport.base import Endpoint, Priority, Stream
from gradstream.wire import v1

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
