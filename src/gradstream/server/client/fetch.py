"""A fetch: chunks are stored as they arrive, and the client asks again for missing chunks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from typing_extensions import override

from gradstream.codec.base import Encoder
from gradstream.errors import PeerLostError, RefusedError
from gradstream.memory import Vector
from gradstream.runtime.base import ComputeProgress
from gradstream.server.client.links import ShardLinks
from gradstream.server.rows import RowMap, RowPart, unpack
from gradstream.telemetry.meters import LinkTraffic
from gradstream.transport.base import Received
from gradstream.wire import v1
from gradstream.wire.frames import CODED

# ---- arrival -----------------------------------------------------------------------------
# The result of a fetch: all parameters, some of their chunks, or the rows that have changed.


class Arrival:
    """A fetch in progress.

    Args:
        vector: memory for the chunks, lent for writing until the fetch is done.
        num_chunks: number of chunks of the vector.
        chunks: the chunks that are fetched; None for all.
        encoder: decodes the chunks; None if they come as they are.

    Attributes:
        versions: version of each chunk; -1 for a chunk that has not landed.
        clocks: clock of each chunk.
        num_landed: number of chunks that have landed.
        size_bytes: bytes of payloads so far.
        task: the task of the fetch.
    """

    def __init__(
        self,
        vector: Vector,
        num_chunks: int,
        chunks: Sequence[int] | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self.vector = vector
        self._encoder = encoder
        self.chunks = range(num_chunks) if chunks is None else chunks
        self.versions = [-1] * num_chunks
        self.clocks = [0] * num_chunks
        self.num_landed = ComputeProgress()
        self.size_bytes = 0
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self.task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def done(self) -> None:
        """Returns once all chunks have landed. Raises the error of the fetch if it failed."""
        assert self.task is not None
        try:
            await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if self._failure is not None and self.task.cancelled():
                raise self._failure from None
            raise

    def fail(self, failure: BaseException) -> None:
        """Ends the fetch with this error, unless it is over: what it waits for can no longer arrive."""
        if self.task is not None and not self.task.done():
            self._failure = failure
            self.task.cancel()

    def borrowed(self, to: str) -> AbstractContextManager[object]:
        """Lends the vector for writing."""
        return self.vector.all.borrowed(write=True, to=to)

    def known(self, chunk: int) -> int | None:
        """The version of a chunk that this worker has, -1 for none; None asks for the whole chunk."""
        return None

    def place(self, header: v1.Chunk, start: int, stop: int) -> torch.Tensor | None:
        """Memory for the payload of an arriving chunk; None makes the carrier allocate it."""
        return None if self._encoder is not None else self.vector.tensor[start:stop]

    def take(
        self, peer: str, header: v1.Chunk, start: int, stop: int, payload: torch.Tensor | None, landed: bool
    ) -> None:
        """Takes in a chunk, elements [start, stop) of the vector.

        Args:
            peer: node name of the shard.
            header: header of the chunk.
            start, stop: bounds of the chunk in the vector.
            payload: the payload; None if the chunk has none.
            landed: whether the payload is already in the memory that `place` gave.

        Raises:
            RefusedError: the client did not ask for the chunk, or it does not fit. Nothing was changed.
        """
        target, size_bytes = self.vector.tensor[start:stop], (stop - start) * self.vector.tensor.itemsize
        if self._encoder is not None or header.flags & CODED:
            size_bytes = self._decode(peer, header, payload, target)
        elif payload is None or not landed:
            _check(peer, header, payload, target)
            assert payload is not None
            target.copy_(payload)
        self.size_bytes += size_bytes
        self.land(header.index, header.version, header.clock)

    def _decode(self, peer: str, header: v1.Chunk, payload: torch.Tensor | None, target: torch.Tensor) -> int:
        """Decodes a chunk into its place, and returns the number of bytes received."""
        encoder = self._encoder
        if encoder is None or not header.flags & CODED:
            what = "elements" if encoder is not None else "words of a codec"
            raise _bad(peer, header, f"{what}; all nodes must have the same fetch_codec")
        if misfit := encoder.misfit(payload, len(target)):
            raise _bad(peer, header, f"{misfit}, by fetch_codec={encoder.codec}")
        assert payload is not None
        encoder.decode(payload, target)
        return payload.nbytes

    @property
    def clock(self) -> int:
        """The parameters include at least this number of updates of every worker that takes part."""
        return min((self.clocks[chunk] for chunk in self.chunks), default=0)

    def land(self, chunk: int, version: int, clock: int = 0) -> None:
        """Notes that a chunk has landed."""
        self.versions[chunk], self.clocks[chunk] = version, clock
        self.num_landed.advance(self.num_landed.value + 1)
        self.release(chunk)

    def release(self, chunk: int) -> None:
        """Wakes every task that waits for a chunk."""
        for future in self._waiters.pop(chunk, ()):
            if not future.done():
                future.set_result(None)

    async def landed(self, chunk: int) -> None:
        """Waits until a chunk has landed, or the fetch is over."""
        if self.versions[chunk] < 0 and self.task is not None and not self.task.done():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(chunk, []).append(future)
            await future


class SparseDelta(Arrival):
    """A fetch of changed rows. It holds them until `apply_to` writes them.

    Args:
        rows: the rows of every chunk.
        known: by chunk, the version that this worker has; -1 for none.
        dtype: element type of the parameters.
        vector: a placeholder, into which nothing is written.
    """

    def __init__(self, rows: RowMap, known: Sequence[int], dtype: torch.dtype, vector: Vector) -> None:
        super().__init__(vector, rows.chunks.num_chunks)
        self._rows = rows
        self._known = list(known)
        self._dtype = dtype
        self._changed: dict[int, RowPart | torch.Tensor] = {}

    @override
    def known(self, chunk: int) -> int | None:
        return self._known[chunk]

    def place(self, header: v1.Chunk, start: int, stop: int) -> torch.Tensor | None:
        """New memory, at most as large as the whole chunk."""
        return torch.empty(header.elems, dtype=self._dtype) if header.elems <= stop - start else None

    @override
    def take(
        self, peer: str, header: v1.Chunk, start: int, stop: int, payload: torch.Tensor | None, landed: bool
    ) -> None:
        if payload is not None and not landed:
            payload = payload.clone()  # the payload may lie in memory that the peer has lent
        if not header.rows:
            like = torch.empty(stop - start, dtype=self._dtype, device="meta")
            self._changed[header.index] = _check(peer, header, payload, like)
        else:
            if payload is None or payload.dtype != self._dtype or self._known[header.index] < 0:
                raise _bad(peer, header, "rows that were not asked for")
            try:
                self._changed[header.index] = unpack(self._rows, header.index, header.rows, payload)
            except ValueError as error:
                raise _bad(peer, header, str(error)) from error
        assert payload is not None
        self.size_bytes += payload.nbytes
        self.land(header.index, header.version, header.clock)

    def unchanged(self, peer: str, chunk: int, version: int) -> None:
        """Notes that the shard's chunk has `version`, and that no row has changed since the version `known`.

        Raises RefusedError if this worker has no version of the chunk.
        """
        if self._known[chunk] < 0:
            raise RefusedError(
                peer,
                "BAD_REQUEST",
                f"says that chunk {chunk} is unchanged, of which this worker has no version",
            )
        self.land(chunk, version)

    def apply_to(self, parameters: torch.Tensor) -> None:
        """Writes the changed rows into parameters (E,), whose chunks have the versions `known`."""
        for chunk, change in self._changed.items():
            start, stop = self._rows.chunks.bounds(chunk)
            if isinstance(change, RowPart):
                parameters[start:stop][self._rows.elements(chunk, change.numbers)] = change.values
            else:
                parameters[start:stop] = change

    @property
    def num_elems(self) -> int:
        """Number of elements that `apply_to` writes."""
        return sum(len(c.values if isinstance(c, RowPart) else c) for c in self._changed.values())


def _check(peer: str, header: v1.Chunk, payload: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Returns the payload. Raises RefusedError if it is no whole chunk."""
    if payload is None or (len(payload), payload.dtype) != (len(like), like.dtype) or header.rows:
        got = "nothing" if payload is None else f"{len(payload)} elements of {payload.dtype}"
        raise _bad(peer, header, f"{got}, expected {len(like)} of {like.dtype}")
    return payload


def _bad(peer: str, header: v1.Chunk, got: str) -> RefusedError:
    return RefusedError(peer, "BAD_REQUEST", f"sent as chunk {header.index} {got}")


# ---- fetch -------------------------------------------------------------------------------


async def fetch(
    links: ShardLinks, arrival: Arrival, terms: v1.Fetch, free: Awaitable[None] | None = None
) -> None:
    """Fetches from all shards. Returns once every chunk has landed. In any case, tasks that wait for one continue then.

    Args:
        links: links to the shards.
        arrival: takes the chunks.
        terms: terms of the fetch. The request to each shard also has that shard's chunks and their known versions.
        free: returns once the arrival's memory may be written; None if it may be written at once.

    Raises:
        The error of `ShardLinks.retrying` or `free`: chunks that have landed stay, the others are undefined.
    """
    begun_ns = links.runtime.now()
    try:
        if free is not None:
            await free
        with arrival.borrowed(f"{links.runtime.node}: fetch"):
            await links.with_chunks(
                lambda name, left: links.retrying(_FromShard(links, arrival, terms, name, left).attempt),
                arrival.chunks,
            )
        links.traffic.fetches += 1
        links.report("fetch", begun_ns, arrival.size_bytes)
    finally:
        for chunk in arrival.chunks:
            arrival.release(chunk)


@dataclass(slots=True)
class _FromShard:
    """The part of a fetch that concerns one shard.

    Args:
        links, arrival, terms: see `fetch`.
        name: node name of the shard.
        left: its chunks that are missing.
        tries: numbers of the attempts.
    """

    links: ShardLinks
    arrival: Arrival
    terms: v1.Fetch
    name: str
    left: dict[int, None]
    tries: Iterator[int] = field(default_factory=itertools.count)

    async def attempt(self, progressed: Callable[[], None]) -> None:
        """Asks for all that is missing."""
        request = self._request()
        opened_ns = self.links.runtime.now()
        stream = await self.links.endpoint.open(self.name, "fetch", request)
        stream.land(self._place)
        try:
            while self.left:
                received = await stream.recv(self.links.silence_s)
                if received is None:
                    raise PeerLostError(self.name, f"ended a fetch with {len(self.left)} chunks missing")
                self._take(received, opened_ns)
                self.links.heard(self.name, opened_ns)
                progressed()
        finally:
            stream.cancel("done")

    @property
    def _traffic(self) -> LinkTraffic:
        return self.links.traffic.links[self.name]

    def _request(self) -> v1.Fetch:
        """The request for the missing chunks."""
        known = (self.arrival.known(chunk) for chunk in self.left)
        request = v1.Fetch()
        request.CopyFrom(self.terms)
        request.chunks.extend(self.left)
        request.known.extend(1 + version for version in known if version is not None)
        request.attempt = next(self.tries)
        return request

    def _place(self, header: v1.Chunk) -> torch.Tensor | None:
        """Memory for a chunk that is about to come; None for a chunk that is not missing."""
        if header.index not in self.left:
            return None
        return self.arrival.place(header, *self.links.chunks.bounds(header.index))

    def _take(self, received: Received, opened_ns: int) -> None:
        """Takes in a chunk, or the list of chunks that have not changed."""
        arrival, traffic = self.arrival, self._traffic
        if received.frame.HasField("body") and isinstance(arrival, SparseDelta):
            unchanged = v1.Unchanged.FromString(received.frame.body.data)
            for chunk, version in zip(unchanged.chunks, unchanged.versions, strict=False):
                self._expected(chunk)
                arrival.unchanged(self.name, chunk, version)
                traffic.whole_fetched_bytes += self._whole_bytes(chunk)
            return
        header, before_bytes = received.frame.chunk, arrival.size_bytes
        self._expected(header.index)
        bounds = self.links.chunks.bounds(header.index)
        arrival.take(self.name, header, *bounds, received.payload, received.landed)
        traffic.fetched_bytes += arrival.size_bytes - before_bytes
        traffic.whole_fetched_bytes += self._whole_bytes(header.index)
        self.links.claim(header, opened_ns)

    def _expected(self, chunk: int) -> None:
        """Notes that a chunk was answered. Raises RefusedError if it was not missing."""
        if chunk not in self.left:
            raise RefusedError(self.name, "BAD_REQUEST", f"sent chunk {chunk}, which it was not asked for")
        del self.left[chunk]

    def _whole_bytes(self, chunk: int) -> int:
        """Size of the whole chunk, in bytes."""
        start, stop = self.links.chunks.bounds(chunk)
        return (stop - start) * self.arrival.vector.tensor.element_size()
