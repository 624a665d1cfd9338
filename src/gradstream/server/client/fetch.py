"""A fetch under way: chunks land as they come; the client asks again for the chunks that are missing."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

import torch

from gradstream.errors import PeerLostError, RefusedError
from gradstream.server.client.arrival import Arrival, SparseDelta
from gradstream.server.client.links import ShardLinks
from gradstream.transport.base import Received
from gradstream.wire import v1


class PendingFetchRequest:
    """One fetch from all shards.

    Args:
        links: links to the shards.
        arrival: takes the chunks.
        terms: terms of the fetch. The request to each shard also has that shard's chunks and their known versions.
    """

    def __init__(self, links: ShardLinks, arrival: Arrival, terms: v1.Fetch) -> None:
        self.links = links
        self.arrival = arrival
        self.terms = terms

    async def run(self, free: Awaitable[None] | None = None) -> None:
        """Returns once every chunk has landed. In any case, tasks that wait for a chunk of it continue then.

        Args:
            free: returns once the arrival's memory may be written; None if it may be written at once.

        Raises:
            The error of `ShardLinks.retrying` or `free`: chunks that have landed stay, the others are undefined.
        """
        links, arrival, begun_ns = self.links, self.arrival, self.links.runtime.now()
        try:
            if free is not None:
                await free
            with arrival.borrowed(f"{links.runtime.node}: fetch"):
                await links.with_chunks(lambda name, left: _FromShard(self, name, left).run(), arrival.chunks)
            links.traffic.fetches += 1
            links.report("fetch", begun_ns, arrival.size_bytes)
        finally:
            for chunk in arrival.chunks:
                arrival.release(chunk)


class _FromShard:
    """The part of a fetch that concerns one shard.

    Args:
        fetch: the fetch.
        name: node name of the shard.
        left: its chunks that are missing.
    """

    def __init__(self, fetch: PendingFetchRequest, name: str, left: dict[int, None]) -> None:
        self._links = fetch.links
        self._arrival = fetch.arrival
        self._terms = fetch.terms
        self._name = name
        self._traffic = fetch.links.traffic.links[name]
        self._left = left
        self._tries = itertools.count()

    async def run(self) -> None:
        await self._links.retrying(self._attempt)

    async def _attempt(self, progressed: Callable[[], None]) -> None:
        request = self._request()
        opened_ns = self._links.runtime.now()
        stream = await self._links.endpoint.open(self._name, "fetch", request)
        stream.land(self._place)
        try:
            while self._left:
                received = await stream.recv(self._links.silence_s)
                if received is None:
                    raise PeerLostError(self._name, f"ended a fetch with {len(self._left)} chunks missing")
                self._take(received, opened_ns)
                self._links.heard(self._name, opened_ns)
                progressed()
        finally:
            stream.cancel("done")

    def _request(self) -> v1.Fetch:
        """The request for the missing chunks."""
        known = (self._arrival.known(chunk) for chunk in self._left)
        request = v1.Fetch()
        request.CopyFrom(self._terms)
        request.chunks.extend(self._left)
        request.known.extend(1 + version for version in known if version is not None)
        request.attempt = next(self._tries)
        return request

    def _place(self, header: v1.Chunk) -> torch.Tensor | None:
        """Memory for a chunk that is about to come; None for a chunk that is not missing."""
        if header.index not in self._left:
            return None
        return self._arrival.place(header, *self._links.chunks.bounds(header.index))

    def _take(self, received: Received, opened_ns: int) -> None:
        """Takes in a chunk, or the list of chunks that have not changed."""
        arrival, traffic = self._arrival, self._traffic
        if received.frame.HasField("body") and isinstance(arrival, SparseDelta):
            unchanged = v1.Unchanged.FromString(received.frame.body.data)
            for chunk, version in zip(unchanged.chunks, unchanged.versions, strict=False):
                self._expected(chunk)
                arrival.unchanged(self._name, chunk, version)
                traffic.whole_fetched_bytes += self._whole_bytes(chunk)
            return
        header, before_bytes = received.frame.chunk, arrival.size_bytes
        self._expected(header.index)
        bounds = self._links.chunks.bounds(header.index)
        arrival.take(self._name, header, *bounds, received.payload, received.landed)
        traffic.fetched_bytes += arrival.size_bytes - before_bytes
        traffic.whole_fetched_bytes += self._whole_bytes(header.index)
        self._links.claim(header, opened_ns)

    def _expected(self, chunk: int) -> None:
        """Notes that a chunk was answered. Raises RefusedError if it was not missing."""
        if chunk not in self._left:
            raise RefusedError(self._name, "BAD_REQUEST", f"sent chunk {chunk}, which it was not asked for")
        del self._left[chunk]

    def _whole_bytes(self, chunk: int) -> int:
        """Size of the whole chunk, in bytes."""
        start, stop = self._links.chunks.bounds(chunk)
        return (stop - start) * self._arrival.vector.tensor.element_size()
