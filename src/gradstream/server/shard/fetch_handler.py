"""Serves fetches: sends each chunk once its terms hold: as it is, encoded, or as the rows that have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradstream.codec.base import WORD, Codec, check_dtype, words_of
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Runtime, Work
from gradstream.server.aggregation import FetchTerms
from gradstream.server.rows import RowPart, pack
from gradstream.server.shard.event_schedule import ChunkRead, FetchArrived
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.inspection import Inspection
from gradstream.server.shard.pending_push import PendingFetch, WaitNotifier
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


class FetchHandler:
    """Serves "fetch".

    Args:
        runtime: runtime of the shard's node.
        executor: releases chunks to fetches.
        inspection: checks each request.
        notifier: tells readers which nodes they wait for.
        silence_s: a fetch ends with DeadlineError if its reader takes no chunk for this long, in seconds.
        codec: encodes the parameters that a worker computes a gradient on; None sends them as they are.

    Raises:
        ConfigError: the codec does not know the elements of the model.
    """

    def __init__(
        self,
        runtime: Runtime,
        executor: ShardExecutor,
        inspection: Inspection,
        notifier: WaitNotifier,
        silence_s: float,
        codec: Codec | None = None,
    ) -> None:
        if codec is not None:
            check_dtype(codec, executor.store.dtype)
        self._codec = codec
        self._runtime = runtime
        self._executor = executor
        self._state = executor.state
        self._store = executor.store
        self._inspection = inspection
        self._notifier = notifier
        self._silence_s = silence_s

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
                self._executor.handle(FetchArrived(chunk, fetch, terms))
            while fetch.ready or fetch.waiting:
                if not fetch.ready:
                    await _tell(stream, request.unchanged)
                    await self._notifier.wait(stream, fetch.wake, fetch.waiting, terms.min_clock)
                    continue
                chunk, waited = fetch.ready.popleft()
                await stream.credit(self._silence_s)
                self._inspection.check_member(stream.opened)
                # No update until the chunk is lent or with the carrier.
                async with self._executor.leases.turn(chunk):
                    await self._send(stream, request, chunk, waited)
            await _tell(stream, request.unchanged)
        finally:
            self._executor.forget(fetch)

    def _read(self, opened: v1.Open) -> _Request:
        """Parses a request, and checks it."""
        request = v1.Fetch.FromString(opened.body)
        self._inspection.check_fetch(opened.sender, request)
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
        now_ns = self._runtime.now()
        fetch = PendingFetch(
            opened.sender, request.number, request.attempt, request.flush, now_ns, set(chunks)
        )
        # What a run ends with is fetched with `flush`, and is sent as it is.
        coded = self._codec is not None and request.number > 0 and not (request.flush or request.vector)
        vector = self._store.vector(request.vector)
        return _Request(chunks, known, vector, terms, fetch, coded, v1.Unchanged())

    async def _send(self, stream: Stream, request: _Request, chunk: int, waited: v1.Waited | None) -> None:
        """Sends a chunk, or its changed rows; adds the chunk to `unchanged` where no row has changed."""
        span, num_rows = self._store.span(request.vector, chunk), 0
        version, read = self._state.version(chunk), ChunkRead(chunk, request.fetch)
        self._executor.handle(read)
        if request.fetch.number:  # the reader computes a gradient on these parameters
            fetch = request.fetch
            await self._executor.updates.note_read(
                fetch.reader, chunk, version, (fetch.number, fetch.attempt)
            )
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
            self._executor.leases.add(chunk, lent)

    async def _encoded(self, span: Span) -> Span:
        """A chunk as the codec encodes it, and zeros up to a whole word. The same for equal parameters."""
        codec, elems = self._codec, len(span)
        assert codec is not None
        sent = Vector("an encoded chunk", span.tensor.new_zeros(words_of(codec, elems), dtype=WORD)).all

        def encode(_: object) -> None:
            codec.encode(span.tensor, sent.tensor.view(torch.uint8)[: codec.encoded_bytes(elems)])

        if not span.tensor.is_meta:
            work = Work("copy", elems=elems)
            await self._runtime.compute(encode, work=work, reads=[span], writes=[sent], lane="exchange")
        return sent


async def _tell(stream: Stream, unchanged: v1.Unchanged) -> None:
    """Sends the list of unchanged chunks and empties it; sends nothing if it is empty."""
    if unchanged.chunks:
        await stream.send(v1.Frame(body=v1.Body(data=unchanged.SerializeToString())))
        unchanged.Clear()
