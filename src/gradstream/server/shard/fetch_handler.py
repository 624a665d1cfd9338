"""Where fetches come in: a chunk is sent once it may be, as it is then: whole, or what has changed of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradstream.memory import Span, Vector
from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import FetchTerms, rank_of
from gradstream.server.rows import RowPart, pack
from gradstream.server.shard.chunk_leases import ChunkLeases
from gradstream.server.shard.event_schedule import Fetched
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.inspection import Inspection
from gradstream.server.shard.known_members import KnownMembers
from gradstream.server.shard.pending_fetch import PendingFetch
from gradstream.server.shard.row_store import ChangedRows
from gradstream.server.shard.store import ShardStore
from gradstream.server.shard.updates import Updates
from gradstream.server.shard.wait_notifier import WaitNotifier
from gradstream.transport.base import Stream
from gradstream.wire import v1
from gradstream.wire.dtypes import to_wire

__all__ = ["FetchHandler"]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a fetch asks for.

    Args:
        chunks: these.
        known: the versions that the reader has of them, -1 for none; of all others it wants everything.
        vector: whose elements.
        terms: of each chunk.
        fetched: the fetch, as far as the order of things is concerned.
    """

    chunks: Sequence[int]
    known: Mapping[int, int]
    vector: Vector
    terms: FetchTerms
    fetched: Fetched


class FetchHandler:
    """Serves "fetch".

    Args:
        runtime: of the shard's node.
        conductor: says when a chunk may be sent.
        inspection: words what is refused.
        news: tells readers for whom they wait.
        store: what is sent.
        updates: notes what was read, where gradients are corrected by it.
        readers: who is at a chunk.
        changed: which rows have changed; None where whole chunks are exchanged.
        known_members: tell who may read.
        silence_s: how long a reader may take nothing of what it asked for.
    """

    def __init__(
        self,
        runtime: Runtime,
        conductor: ShardExecutor,
        inspection: Inspection,
        news: WaitNotifier,
        store: ShardStore,
        updates: Updates,
        readers: ChunkLeases,
        changed: ChangedRows | None,
        known_members: KnownMembers,
        *,
        silence_s: float,
    ) -> None:
        self._runtime = runtime
        self._conductor = conductor
        self._inspection = inspection
        self._news = news
        self._store = store
        self._updates = updates
        self._readers = readers
        self._changed = changed
        self._known_members = known_members
        self._silence_s = silence_s

    async def serve(self, stream: Stream) -> None:
        """Sends what a reader asks for, and returns once all of it is sent or lent.

        Raises:
            RefusedError: it asks for what is not here, and nothing was sent; or has left the run meanwhile.
            ConfigError: for a vector that is not.
        """
        asked = self._asked(stream.opened)
        terms, unchanged = asked.terms, v1.Unchanged()
        outbox = PendingFetch(terms.sender, asked.fetched, self._runtime.now(), set(asked.chunks))
        try:
            for chunk in asked.chunks:
                self._conductor.ask(outbox, chunk, terms)
            while outbox.ready or outbox.waiting:
                if not outbox.ready:
                    await _tell(stream, unchanged)
                    await self._news.of(stream, outbox.wake, outbox.waiting, terms.min_clock)
                    continue
                chunk, waited = outbox.ready.popleft()
                await stream.credit(self._silence_s)
                self._known_members.check(stream.opened)
                async with self._readers.turn(chunk):  # one version, until it is lent or the carrier's
                    await self._send(stream, asked, outbox, chunk, waited, unchanged)
            await _tell(stream, unchanged)
        finally:
            self._conductor.forget(outbox)

    def _asked(self, opened: v1.Open) -> _Asked:
        """Reads a request, and checks it."""
        request = v1.Fetch.FromString(opened.body)
        here = self._conductor.numbers()
        self._inspection.fetch(opened.sender, request, set(here))
        chunks = list(request.chunks) or here
        known = dict(zip(chunks, (version - 1 for version in request.known), strict=False))
        terms = FetchTerms(
            opened.sender,
            opened.incarnation,
            request.min_version,
            request.after_sequence,
            flush=request.flush,
            beside=request.number == 0,
            min_clock=request.min_clock,
        )
        fetched = Fetched(rank_of(opened.sender), request.number, request.attempt, acts=request.flush)
        return _Asked(chunks, known, self._store.vector(request.vector), terms, fetched)

    async def _send(
        self,
        stream: Stream,
        asked: _Asked,
        outbox: PendingFetch,
        chunk: int,
        waited: v1.Waited | None,
        unchanged: v1.Unchanged,
    ) -> None:
        """Sends a chunk, or what has changed of it; where nothing has, puts it down as `unchanged`."""
        span, num_rows = self._store.span(asked.vector, chunk), 0
        version, clock = self._conductor.version(chunk), self._conductor.read(outbox, chunk)
        if not asked.terms.beside:
            await self._updates.note_read(outbox.reader, chunk, version)
        numbers = self._changed_since(chunk, asked.known.get(chunk))
        if numbers is not None and not len(numbers):
            unchanged.chunks.append(chunk)
            unchanged.versions.append(version)
            return
        if numbers is not None:
            span, num_rows = self._packed(chunk, numbers, span), len(numbers)
        header = v1.Chunk(
            index=chunk,
            elems=len(span),
            dtype=to_wire(self._store.dtype),
            version=version,
            waited=waited,
            clock=clock,
            rows=num_rows,
        )
        lent = await stream.lend(v1.Frame(chunk=header), span)
        if not num_rows:  # rows were copied
            self._readers.add(chunk, lent)

    def _changed_since(self, chunk: int, known: int | None) -> torch.Tensor | None:
        """The rows that are enough for who has a version; None where the whole chunk is to be sent."""
        return None if known is None or self._changed is None else self._changed.since(chunk, known)

    def _packed(self, chunk: int, numbers: torch.Tensor, span: Span) -> Span:
        """The payload of some rows."""
        assert self._changed is not None
        values = span.tensor[self._changed.rows.elements(chunk, numbers)]
        return Vector(f"rows of chunk {chunk}", pack(RowPart(numbers, values))).all


async def _tell(stream: Stream, unchanged: v1.Unchanged) -> None:
    """Sends what has been put down as unchanged, if anything, and puts it down no more."""
    if unchanged.chunks:
        await stream.send(v1.Frame(body=v1.Body(data=unchanged.SerializeToString())))
        unchanged.Clear()
