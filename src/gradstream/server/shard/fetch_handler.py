"""Serves fetches: sends each chunk once its terms hold, as it is then: all of it, or the rows that have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradstream.memory import Span, Vector
from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import FetchTerms
from gradstream.server.rows import RowPart, pack
from gradstream.server.shard.chunk_leases import ChunkLeases
from gradstream.server.shard.event_schedule import ChunkRead, FetchArrived
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.inspection import Inspection
from gradstream.server.shard.known_members import KnownMembers
from gradstream.server.shard.pending_fetch import PendingFetch
from gradstream.server.shard.row_store import ChangedRows
from gradstream.server.shard.state import ShardState
from gradstream.server.shard.store import ShardStore
from gradstream.server.shard.updates import Updates
from gradstream.server.shard.wait_notifier import WaitNotifier
from gradstream.transport.base import Stream
from gradstream.wire import v1
from gradstream.wire.dtypes import to_wire

__all__ = ["FetchHandler"]


@dataclass(frozen=True, slots=True)
class _Request:
    """What a fetch asks for.

    Args:
        chunks: numbers of the chunks, in this order.
        known: by chunk, the version that the reader has, -1 for none; it wants all of a chunk that is left out.
        vector: vector whose elements are sent.
        terms: terms of each chunk.
        fetch: which of the chunks are ready, and which wait.
        unchanged: chunks of which nothing is sent, since no row has changed; not told to the reader yet.
    """

    chunks: Sequence[int]
    known: Mapping[int, int]
    vector: Vector
    terms: FetchTerms
    fetch: PendingFetch
    unchanged: v1.Unchanged


class FetchHandler:
    """Serves "fetch".

    Args:
        runtime: runtime of the shard's node.
        executor: releases chunks to fetches.
        state: numbers and versions of the chunks.
        inspection: checks what is asked for.
        notifier: tells readers for whom they wait.
        store: memory that is sent.
        updates: keeps copies of what is read, where gradients are corrected by them.
        leases: a chunk is not updated while it is being sent.
        changed: which rows have changed; None where whole chunks are exchanged.
        known_members: refuses nodes that have left.
        silence_s: seconds that a reader may take nothing of what it asked for.
    """

    def __init__(
        self,
        runtime: Runtime,
        executor: ShardExecutor,
        state: ShardState,
        inspection: Inspection,
        notifier: WaitNotifier,
        store: ShardStore,
        updates: Updates,
        leases: ChunkLeases,
        changed: ChangedRows | None,
        known_members: KnownMembers,
        *,
        silence_s: float,
    ) -> None:
        self._runtime = runtime
        self._executor = executor
        self._state = state
        self._inspection = inspection
        self._notifier = notifier
        self._store = store
        self._updates = updates
        self._leases = leases
        self._changed = changed
        self._known_members = known_members
        self._silence_s = silence_s

    async def serve(self, stream: Stream) -> None:
        """Sends what a reader asks for; returns once all of it is sent or lent.

        Raises:
            RefusedError: the reader asks for what is not here, and nothing was sent; or it has left the run
                meanwhile.
            ConfigError: there is no vector of that name.
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
                self._known_members.check(stream.opened)
                async with self._leases.turn(chunk):  # one version, until it is lent or the carrier's
                    await self._send(stream, request, chunk, waited)
            await _tell(stream, request.unchanged)
        finally:
            self._executor.forget(fetch)

    def _read(self, opened: v1.Open) -> _Request:
        """Reads a request, and checks it."""
        request = v1.Fetch.FromString(opened.body)
        self._inspection.fetch(opened.sender, request, self._state.chunks)
        chunks = list(request.chunks) or list(self._state.chunks)
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
        now_ns = self._runtime.now()
        fetch = PendingFetch(
            opened.sender, request.number, request.attempt, request.flush, now_ns, set(chunks)
        )
        return _Request(chunks, known, self._store.vector(request.vector), terms, fetch, v1.Unchanged())

    async def _send(self, stream: Stream, request: _Request, chunk: int, waited: v1.Waited | None) -> None:
        """Sends a chunk, or its rows that have changed; where none has, adds it to `unchanged`."""
        span, num_rows = self._store.span(request.vector, chunk), 0
        version, read = self._state.version(chunk), ChunkRead(chunk, request.fetch)
        self._executor.handle(read)
        if not request.terms.beside:
            await self._updates.note_read(request.fetch.reader, chunk, version)
        numbers = self._changed_since(chunk, request.known.get(chunk))
        if numbers is not None and not len(numbers):
            request.unchanged.chunks.append(chunk)
            request.unchanged.versions.append(version)
            return
        if numbers is not None:
            span, num_rows = self._packed(chunk, numbers, span), len(numbers)
        header = v1.Chunk(
            index=chunk,
            elems=len(span),
            dtype=to_wire(self._store.dtype),
            version=version,
            waited=waited,
            clock=read.clock,
            rows=num_rows,
        )
        lent = await stream.lend(v1.Frame(chunk=header), span)
        if not num_rows:  # rows were copied
            self._leases.add(chunk, lent)

    def _changed_since(self, chunk: int, known: int | None) -> torch.Tensor | None:
        """The rows that a reader of version `known` lacks; None where the whole chunk is to be sent."""
        return None if known is None or self._changed is None else self._changed.since(chunk, known)

    def _packed(self, chunk: int, numbers: torch.Tensor, span: Span) -> Span:
        """The payload of these rows."""
        assert self._changed is not None
        values = span.tensor[self._changed.rows.elements(chunk, numbers)]
        return Vector(f"rows of chunk {chunk}", pack(RowPart(numbers, values))).all


async def _tell(stream: Stream, unchanged: v1.Unchanged) -> None:
    """Sends the list of unchanged chunks, if there are any, and empties it."""
    if unchanged.chunks:
        await stream.send(v1.Frame(body=v1.Body(data=unchanged.SerializeToString())))
        unchanged.Clear()
