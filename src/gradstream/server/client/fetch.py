"""A fetch under way: chunks land as they come, and those that are left are asked for again."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

import torch

from gradstream.errors import PeerLostError, RefusedError
from gradstream.server.client.arrival import Arrival, SparseDelta
from gradstream.server.client.links import ShardLinks
from gradstream.transport.base import Received
from gradstream.wire import v1

__all__ = ["PendingFetchRequest"]


class PendingFetchRequest:
    """One fetch from all shards.

    Args:
        links: to them.
        arrival: where it lands.
        terms: of the fetch; which chunks, and what is known of them, is filled in for each shard.
    """

    def __init__(self, links: ShardLinks, arrival: Arrival, terms: v1.Fetch) -> None:
        self.links = links
        self.arrival = arrival
        self.terms = terms

    async def run(self, free: Awaitable[None] | None = None) -> None:
        """Returns once everything has landed; in any case, who waits for a chunk of it may go on then.

        Args:
            free: the arrival's memory can be written once this is done; None for at once.

        Raises:
            What `ShardLinks.retrying` or `free` raises: what has landed stays, the rest is undefined.
        """
        links, arrival, begun_ns = self.links, self.arrival, self.links.runtime.now()
        try:
            if free is not None:
                await free
            with arrival.borrowed(f"{links.runtime.node}: fetch"):
                await links.with_each(lambda rank, name: _FromShard(self, rank, name).run())
            links.traffic.fetches += 1
            links.report("fetch", begun_ns, arrival.size_bytes)
        finally:
            for chunk in range(links.chunks.num_chunks):
                arrival.release(chunk)


class _FromShard:
    """A fetch from one shard.

    Args:
        fetch: of which this is a part.
        rank, name: of the shard.
    """

    def __init__(self, fetch: PendingFetchRequest, rank: int, name: str) -> None:
        self._links = fetch.links
        self._arrival = fetch.arrival
        self._terms = fetch.terms
        self._name = name
        self._traffic = fetch.links.traffic.links[name]
        self._left = dict.fromkeys(fetch.links.chunks.chunks_of(rank))  # not there yet
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
        """For what is left."""
        known = (self._arrival.known(chunk) for chunk in self._left)
        request = v1.Fetch()
        request.CopyFrom(self._terms)
        request.chunks.extend(self._left)
        request.known.extend(1 + version for version in known if version is not None)
        request.attempt = next(self._tries)
        return request

    def _place(self, header: v1.Chunk) -> torch.Tensor | None:
        """Where a chunk belongs that is about to come, if it was asked for."""
        if header.index not in self._left:
            return None
        return self._arrival.place(header, *self._links.chunks.bounds(header.index))

    def _take(self, received: Received, opened_ns: int) -> None:
        """A chunk has come, or the word that some have not changed."""
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
        """An answer of this chunk has come: it was asked for, and is not any more."""
        if chunk not in self._left:
            raise RefusedError(self._name, "BAD_REQUEST", f"sent chunk {chunk}, not asked for")
        del self._left[chunk]

    def _whole_bytes(self, chunk: int) -> int:
        """All of a chunk."""
        start, stop = self._links.chunks.bounds(chunk)
        return (stop - start) * self._arrival.vector.tensor.element_size()
