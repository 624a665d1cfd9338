"""Serves fetches: sends each chunk once its terms hold: as it is, encoded, or as the rows that have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradstream.codec.base import WORD, Encoder
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Runtime, Work
from gradstream.server.aggregation import FetchTerms
from gradstream.server.rows import RowPart, pack
from gradstream.server.shard.event_schedule import ChunkRead, FetchArrived
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.inspection import Inspection
from gradstream.server.shard.pending_push import PendingFetch, WaitNotifier
from gradstream.server.shard.store import ShardStore
from gradstream.transport.base import Stream
from gradstream.wire import v1
from gradstream.wire.frames import CODED, to_wire


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
