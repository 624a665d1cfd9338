"""Serves pushes: checks each chunk, passes it to the executor, and sends the results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gradstream.codec.base import WORD, Encoder
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Runtime, Work
from gradstream.server.aggregation import FetchTerms, PushHeader, rank_of
from gradstream.server.rows import Part, RowPart, pack
from gradstream.server.shard.agreement import Quorum
from gradstream.server.shard.event_schedule import ChunkRead, FetchArrived, PushArrived
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.inspection import Inspection
from gradstream.server.shard.pushes import KeptPushes, PendingFetch, PendingPush, WaitNotifier
from gradstream.server.shard.state import Parked, Sender
from gradstream.server.shard.store import ShardStore
from gradstream.transport.base import Stream
from gradstream.wire import v1
from gradstream.wire.frames import CODED, to_wire

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


# ---- fetch handler -----------------------------------------------------------------------
# Serves fetches: sends each chunk once its terms hold: as it is, encoded, or as the rows that have changed.


@dataclass(frozen=True, slots=True)
class _Request:
    """A fetch that a worker, the reader, has requested.

    Args:
        chunks: numbers of the chunks, in the order of the request.
        known: by chunk, the version that the reader has already (-1: none), so that only changed rows are sent.
            A chunk that is not listed is sent whole.
        vector: vector whose elements are sent.
        terms: conditions under which each chunk may be sent.
        fetch: the chunks that are ready, and the chunks that wait.
        coded: the reader computes gradients on what is sent, which is encoded.
        unchanged: chunks without changed rows of which the reader has not been told yet.
    """

    chunks: Sequence[int]
    known: Mapping[int, int]
    vector: Vector
    terms: FetchTerms
    fetch: PendingFetch
    coded: bool
    unchanged: v1.Unchanged


@dataclass(eq=False)
class FetchHandler:
    """Serves "fetch".

    Args:
        runtime: runtime of the shard's node.
        executor: releases chunks to fetches.
        inspection: checks each request.
        notifier: tells readers which nodes they wait for.
        silence_s: a fetch ends with DeadlineError if its reader takes no chunk for this long, in seconds.
        encoder: encodes the parameters that a worker computes a gradient on; None sends them as they are.
    """

    runtime: Runtime
    executor: ShardExecutor
    inspection: Inspection
    notifier: WaitNotifier
    silence_s: float
    encoder: Encoder | None = None

    @property
    def _store(self) -> ShardStore:
        return self.executor.store

    async def serve(self, stream: Stream) -> None:
        """Sends the chunks that a reader asks for. Returns once all of them are sent or lent.

        Raises:
            RefusedError: a chunk is not on this shard, and nothing was sent; or the reader has left the run
                meanwhile.
            ConfigError: the shard has no vector of this name.
        """
        request = self._read(stream.opened)
        fetch, terms = request.fetch, request.terms
        try:
            for chunk in request.chunks:
                self.executor.handle(FetchArrived(chunk, fetch, terms))
            while fetch.ready or fetch.waiting:
                if not fetch.ready:
                    await _tell(stream, request.unchanged)
                    await self.notifier.wait(stream, fetch.wake, fetch.waiting, terms.min_clock)
                    continue
                chunk, waited = fetch.ready.popleft()
                await stream.credit(self.silence_s)
                self.inspection.check_member(stream.opened)
                # No update until the chunk is lent or with the carrier.
                async with self.executor.leases.turn(chunk):
                    await self._send(stream, request, chunk, waited)
            await _tell(stream, request.unchanged)
        finally:
            self.executor.forget(fetch)

    def _read(self, opened: v1.Open) -> _Request:
        """Parses a request, and checks it."""
        request = v1.Fetch.FromString(opened.body)
        self.inspection.check_fetch(opened.sender, request)
        chunks = list(request.chunks) or list(self._store.here)
        known = dict(zip(chunks, (version - 1 for version in request.known), strict=False))
        terms = FetchTerms(
            opened.sender,
            opened.incarnation,
            request.min_version,
            request.after_sequence,
            flush=request.flush,
            min_clock=request.min_clock,
        )
        now_ns = self.runtime.now()
        fetch = PendingFetch(
            opened.sender, request.number, request.attempt, request.flush, now_ns, set(chunks)
        )
        # What a run ends with is fetched with `flush`, and is sent as it is.
        coded = self.encoder is not None and request.number > 0 and not (request.flush or request.vector)
        vector = self._store.vector(request.vector)
        return _Request(chunks, known, vector, terms, fetch, coded, v1.Unchanged())

    async def _send(self, stream: Stream, request: _Request, chunk: int, waited: v1.Waited | None) -> None:
        """Sends a chunk, or its changed rows; adds the chunk to `unchanged` where no row has changed."""
        span, num_rows = self._store.span(request.vector, chunk), 0
        version, read = self.executor.state.version(chunk), ChunkRead(chunk, request.fetch)
        self.executor.handle(read)
        if request.fetch.number:  # the reader computes a gradient on these parameters
            fetch = request.fetch
            await self.executor.updates.note_read(fetch.reader, chunk, version, (fetch.number, fetch.attempt))
        changed, known = self._store.changed, request.known.get(chunk)
        numbers = None if changed is None or known is None else changed.since(chunk, known)
        if changed is not None and numbers is not None:
            num_rows = len(numbers)
            if not num_rows:
                request.unchanged.chunks.append(chunk)
                request.unchanged.versions.append(version)
                return
            values = span.tensor[changed.rows.elements(chunk, numbers)]
            span = Vector(f"rows of chunk {chunk}", pack(RowPart(numbers, values))).all
        if request.coded:
            span = await self._encoded(span)
        header = v1.Chunk(
            index=chunk,
            elems=len(span),
            dtype=to_wire(self._store.dtype),
            version=version,
            waited=waited,
            clock=read.clock,
            rows=num_rows,
            flags=CODED if request.coded else 0,
        )
        lent = await stream.lend(v1.Frame(chunk=header), span)
        if not (num_rows or request.coded):  # those were copied
            self.executor.leases.add(chunk, lent)

    async def _encoded(self, span: Span) -> Span:
        """A chunk as the codec encodes it, and zeros up to a whole word. The same for equal parameters."""
        encoder = self.encoder
        assert encoder is not None
        sent = Vector("an encoded chunk", span.tensor.new_empty(encoder.words(len(span)), dtype=WORD)).all
        if not span.tensor.is_meta:
            await self.runtime.compute(
                lambda _: encoder.encode(span.tensor, sent.tensor),
                work=Work("copy", elems=len(span)),
                reads=[span],
                writes=[sent],
                lane="exchange",
            )
        return sent


async def _tell(stream: Stream, unchanged: v1.Unchanged) -> None:
    """Sends the list of unchanged chunks and empties it; sends nothing if it is empty."""
    if unchanged.chunks:
        await stream.send(v1.Frame(body=v1.Body(data=unchanged.SerializeToString())))
        unchanged.Clear()
