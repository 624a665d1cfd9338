"""Serves pushes: checks each chunk, passes it to the executor, and sends the results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import PushHeader, rank_of
from gradstream.server.rows import Part
from gradstream.server.shard.agreement import Quorum
from gradstream.server.shard.event_schedule import PushArrived
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.inspection import Inspection
from gradstream.server.shard.kept_pushes import KeptPushes
from gradstream.server.shard.pending_push import PendingPush, WaitNotifier
from gradstream.server.shard.state import Parked, Sender
from gradstream.transport.base import Stream
from gradstream.wire import v1

# ---- push pacer --------------------------------------------------------------------------
# The `PushPacer`: pushes of one round are read side by side, so that the slowest of them gets the network.

LEAD_CHUNKS = 2
"""Chunks that a push may be ahead of the slowest. What its sender has credit for comes on top."""


class PushPacer:
    """Decides which push of a round the shard reads next: none that is far ahead of the slowest in progress.

    Every worker of a synchronous round waits for the last chunk of the slowest push. Connections share a network
    card unevenly. A push that gets ahead takes bandwidth from the push that all wait for, and meanwhile the shard
    has no complete chunk to send: its card is busy in one direction only. A push that the shard does not read runs
    out of credit, its sender pauses, and the others get the bandwidth. A push that has not begun, or has ended,
    holds nobody up. The order of summation is not affected.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, _Round] = {}

    @contextmanager
    def push(self, number: int) -> Iterator[PacedPush]:
        """Paces one push of the round of this number. The context is the push: it begins and ends with it."""
        pushes = self._rounds.setdefault(number, _Round())
        push = PacedPush(pushes)
        pushes.moved(None, 0)
        try:
            yield push
        finally:
            pushes.moved(push.num_read, None)
            if not pushes:
                del self._rounds[number]


class PacedPush:
    """How much of a push has been read.

    Attributes:
        num_read: number of its chunks.
    """

    def __init__(self, pushes: _Round) -> None:
        self.num_read = 0
        self._pushes = pushes

    async def turn(self) -> None:
        """Returns once the push is at most `LEAD_CHUNKS` ahead of the slowest."""
        while self.num_read > self._pushes.slowest + LEAD_CHUNKS:
            await self._pushes.slowest_moved.wait()

    def read(self) -> None:
        """Counts a chunk."""
        self.num_read += 1
        self._pushes.moved(self.num_read - 1, self.num_read)


class _Round:
    """The pushes of a round that are in progress: how many have read this many chunks."""

    def __init__(self) -> None:
        self.slowest = 0
        self.slowest_moved = asyncio.Event()
        self._pushes_at: Counter[int] = Counter()

    def __bool__(self) -> bool:
        return bool(self._pushes_at)

    def moved(self, before: int | None, after: int | None) -> None:
        """Notes that a push has read on; before it begins and after its end, that is None."""
        if before is not None:
            self._pushes_at[before] -= 1
            if not self._pushes_at[before]:
                del self._pushes_at[before]
        if after is not None:
            self._pushes_at[after] += 1
        if after == 0:
            self.slowest = 0
        elif self._pushes_at and self.slowest not in self._pushes_at:
            self.slowest = min(self._pushes_at)
            self.slowest_moved.set()
            self.slowest_moved = asyncio.Event()


# ---- push handler ------------------------------------------------------------------------

RESULTS_PER_FRAME = 16
"""Results that share a frame: a frame for each result would cost a tenth as much as its chunk."""


@dataclass(eq=False)
class PushHandler:
    """Serves "push".

    Args:
        runtime: runtime of the shard's node.
        executor: handles each chunk that arrives.
        inspection: checks each chunk before the executor gets it.
        notifier: tells senders which nodes they wait for.
        quorum: counts the chunks that have come; None if there is no quorum.
        pacer: chooses which push of a round to read next; None reads each as fast as it comes.
        kept_pushes: keeps the minibatches of pushes, in case their senders die.
    """

    runtime: Runtime
    executor: ShardExecutor
    inspection: Inspection
    notifier: WaitNotifier
    quorum: Quorum | None
    pacer: PushPacer | None
    kept_pushes: KeptPushes
    _waiting: Counter[Sender] = field(default_factory=Counter, init=False)  # chunks without a result

    def keep_senders(self, members: Collection[Sender]) -> None:
        """Forgets all other senders, which have left."""
        for gone in [sender for sender in self._waiting if sender not in members]:
            del self._waiting[gone]

    async def serve(self, stream: Stream) -> None:
        """Receives a push; returns once its sender has the result of every chunk.

        Raises:
            RefusedError: a chunk does not fit, or holds a NaN or an infinity, or the sender has left the run
                meanwhile. The chunks before it stay in effect.
        """
        request = v1.Push.FromString(stream.opened.body)
        self.inspection.check_push(stream.opened, request)
        opened = stream.opened
        if request.HasField("behalf"):
            self.kept_pushes.check_substitute(opened, request)
        else:
            self.kept_pushes.note((opened.sender, opened.incarnation), request)
        push = PendingPush(stream, self.runtime.now(), self._waiting)
        await self.runtime.gather(self._receive(push, request), self._answer(push))

    async def _receive(self, push: PendingPush, request: v1.Push) -> None:
        """Reads chunks until the sender has sent everything."""
        if self.pacer is not None and request.command == v1.Push.APPLY:
            with self.pacer.push(request.round) as paced:
                came = await self._read(push, request, paced)
        else:
            came = await self._read(push, request, None)
        if request.rows:
            empty = [index for index in self.executor.state.chunks if index not in came]
            for index in empty:
                self._check_base_version(push, request, index, request.base_version)
            for index in empty:
                push.empty.add(index)
                self._arrived(push, request, index, request.base_version)
        push.ended = True
        push.wake.set()

    async def _read(self, push: PendingPush, request: v1.Push, paced: PacedPush | None) -> set[int]:
        """Passes each chunk that arrives to the executor; returns their numbers at the end of the stream."""
        came = set[int]()
        while (received := await push.stream.recv()) is not None:
            chunk = received.frame.chunk
            part, length = self.inspection.part(push.sender, received)
            if chunk.index in came:
                raise self.inspection.bad(push.sender, f"chunk {chunk.index} comes twice in one push")
            came.add(chunk.index)
            self._check_base_version(push, request, chunk.index, chunk.version)
            self._arrived(push, request, chunk.index, chunk.version, part, length)
            await self.runtime.sleep(0)  # its update begins now, while the elements are in the cache
            if paced is not None:
                paced.read()
                await paced.turn()
        return came

    def _check_base_version(self, push: PendingPush, request: v1.Push, chunk: int, base_version: int) -> None:
        version = self.executor.state.version(chunk)
        self.inspection.check_base_version(push.sender, chunk, request, base_version, version)

    def _arrived(
        self,
        push: PendingPush,
        request: v1.Push,
        chunk: int,
        base_version: int,
        part: Part | None = None,
        length: float = 0.0,
    ) -> None:
        """Passes one chunk of a push to the executor; the part of an empty chunk is None.

        Behind an empty chunk are no samples, unless the push has rows: then this chunk's part of the gradient is 0.
        """
        opened = push.stream.opened
        self.inspection.check_member(opened)
        redone = request.HasField("behalf")
        if redone:  # again: the redo may be done, and the lost worker's windows freed
            self.kept_pushes.check_substitute(opened, request)
        sender = request.behalf if redone else opened
        header = PushHeader(
            sender=sender.sender,
            rank=request.stands_for if request.HasField("stands_for") else rank_of(sender.sender),
            incarnation=sender.incarnation,
            sequence=request.sequence,
            samples=request.samples if part is not None or request.rows else 0,
            num_gradients=request.num_gradients,
            lr=request.lr,
            round=request.round,
            base_version=base_version,
            empty=part is None,
            clock=request.clock,
            loss=request.loss,
            vector=request.vector,
            redone=redone,
            length=length,
            portion=request.portion,
        )
        assign = request.command == v1.Push.ASSIGN
        self.inspection.check_waiting(push.sender, self._waiting[push.key])
        push.took(chunk, part)
        self.executor.handle(PushArrived(chunk, Parked(header, push, assign)))
        if self.quorum is not None and not assign:
            self.quorum.came(request.round, header.rank, chunk)

    async def _answer(self, push: PendingPush) -> None:
        """Sends results until every chunk has one."""
        sent: set[int] = set()  # empty chunks whose result was sent
        while push.results or sent != push.empty or push.pending or not push.ended:
            complete = push.ended and not push.pending
            more = len(push.results) < RESULTS_PER_FRAME and not complete
            if more and await self.notifier.wait(push.stream, push.wake, push.pending):
                continue
            results, push.results = push.results, []
            empty = push.empty - push.pending - sent
            sent |= empty
            if results or empty:
                data = v1.PushResults(results=results, absent=sorted(empty)).SerializeToString()
                await push.stream.send(v1.Frame(body=v1.Body(data=data)))
