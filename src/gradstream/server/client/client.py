"""The worker's side of the parameter server.

Operations of a worker on one chunk take effect in the order of their calls: a fetch sees the worker's
own pushes before it, and a push of a chunk waits until the fetch before it has landed. Different chunks
and different shards are independent, so both directions of the network are busy at once.

Every exchange is retried until `retry_s` have passed without progress. A push keeps its sequence
number, so that it is applied once, whatever happened to the first try.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from gradstream.errors import InternalError
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime, awaited_later
from gradstream.server.client.arrival import Arrival, SparseDelta
from gradstream.server.client.fetch import PendingFetchRequest
from gradstream.server.client.links import ShardLinks
from gradstream.server.client.push import PendingPushRequest
from gradstream.server.rows import RowMap
from gradstream.server.update import Update, UpdatePiece
from gradstream.telemetry.traffic import Transfer
from gradstream.transport.base import Endpoint
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap

__all__ = ["ServerClient"]


class ServerClient:
    """All shards, as one server.

    Args:
        runtime: runtime of this worker's node.
        endpoint: endpoint of this worker's node.
        shards: node names of the shards, in the order of the chunk map.
        chunks: the chunk map.
        back_buffer: vector that the first fetch lands in.
        silence_s: seconds that a shard may be silent; one that waits for others says so.
        retry_s: seconds that an exchange is retried without any progress.
        on_transfer: called with each push and fetch that is done.
        rows: the rows of every chunk, where only changed rows are exchanged; None exchanges whole chunks.

    Attributes:
        known: by chunk, the version of the replica's parameters; -1 for none. With `rows`, a fetch is a
            `SparseDelta` against these.
        back_buffer: vector that the next fetch lands in; None until the last one was swapped in.
        clock: clock of this worker.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        shards: Sequence[str],
        chunks: ChunkMap,
        back_buffer: Vector,
        *,
        silence_s: float,
        retry_s: float,
        on_transfer: Callable[[Transfer], None] | None = None,
        rows: RowMap | None = None,
    ) -> None:
        self.chunks = chunks
        self.rows = rows
        self.known: Sequence[int] = [-1] * chunks.num_chunks
        self.back_buffer: Vector | None = back_buffer
        self.clock = 0
        self._runtime = runtime
        self._links = ShardLinks(
            runtime,
            endpoint,
            shards,
            chunks,
            silence_s=silence_s,
            retry_s=retry_s,
            on_transfer=on_transfer,
        )
        self.traffic, self.claims = self._links.traffic, self._links.claims
        self._sequence = 0  # of the push or command issued last
        self._last_push = 0  # of the push issued last
        self._pushing: asyncio.Task[None] | None = None
        self._pushed: Vector | None = None  # by the push started last
        self._last_fetch: Arrival | None = None
        self._num_fetches = 0

    # ---- operations ---------------------------------------------------------------------

    async def push_soon(self, update: Update, *, advance_clock: bool = False) -> None:
        """Starts a push, once the one before it is done.

        Args:
            update: the update; a push of no gradients is done at once.
            advance_clock: whether the push advances this worker's clock by one.

        Raises:
            GradstreamError: the error of the push before, which may have been applied to some chunks.
        """
        await self.flush()
        if update.vector is None and update.num_gradients == 0:  # nothing was accumulated
            if update.on_done is not None:
                update.on_done()
            return
        if advance_clock:
            self.clock += 1
            update.clock = self.clock
        if update.prompt and update.pieces is not None:
            made = await update.pieces()
            update.pieces = partial(_at_once, made)
        self._sequence += 1
        update.sequence = self._sequence
        # Initial parameters cannot wait for a fetch, which may be waiting for them.
        sequence, before = self._sequence, None if update.assign else self._last_fetch
        self._pushed = update.vector
        self._last_push = sequence
        name = f"{self._runtime.node}-push-{sequence}"
        push = PendingPushRequest(self._links, update, sequence, before)
        self._pushing = awaited_later(self._runtime.spawn(push.run(), name=name))

    def flush(self) -> Coroutine[Any, Any, None]:
        """Returns once every shard has acknowledged the last push that was started before this call.

        Raises:
            GradstreamError: the error of that push.
        """
        return self._settled(self._pushing)

    @staticmethod
    async def _settled(pushing: asyncio.Task[None] | None) -> None:
        if pushing is not None:
            await asyncio.shield(pushing)

    def fetch_soon(
        self,
        *,
        min_version: int = 0,
        own: bool = True,
        flush: bool = False,
        min_clock: int = 0,
        vector: str = "",
    ) -> Arrival:
        """Starts a fetch of all parameters into the back buffer; a swap leaves the caller's old vector there.

        Each chunk is of one version, at least `min_version`. If the back buffer holds the last push, the fetch
        waits for that push first.

        Args:
            min_version: smallest version that the shards may send.
            own: whether all own pushes before it must be applied, or be in the server's sum; else the fetch may
                overtake them.
            flush: whether the server applies its sums first, though no update is due.
            min_clock: number of updates of every worker that must be in it.
            vector: name of a state vector of the update rule to fetch; "" for the parameters.

        Raises:
            InternalError: the fetch before was not swapped in yet, so there is no back buffer.
        """
        if self.back_buffer is None:
            raise InternalError("a second fetch before the first was swapped in: there is one back buffer")
        arrival, self.back_buffer = self._arrival(self.back_buffer), None
        self._num_fetches += 1
        terms = v1.Fetch(
            min_version=min_version,
            after_sequence=self._last_push if own else 0,
            number=self._num_fetches,
            flush=flush,
            min_clock=min_clock,
            vector=vector,
        )
        name = f"{self._runtime.node}-fetch-after-{self._sequence}"
        free = self.flush() if self._pushed is arrival.vector else None
        fetch = PendingFetchRequest(self._links, arrival, terms)
        arrival.task = awaited_later(self._runtime.spawn(fetch.run(free), name=name))
        self._last_fetch = arrival
        return arrival

    def _arrival(self, vector: Vector) -> Arrival:
        if self.rows is None:
            return Arrival(vector, self.chunks.num_chunks)
        return SparseDelta(self.rows, self.known, vector.tensor.dtype, vector)

    async def fetch_into(self, vector: Vector) -> None:
        """Fetches all parameters as they are now, in no order with the operations above.

        Compute no gradients on them to push: a shard whose correction needs a copy of what a worker has read keeps
        none of this fetch.
        """
        await PendingFetchRequest(self._links, Arrival(vector, self.chunks.num_chunks), v1.Fetch()).run()

    async def reclaim_back_buffer(self) -> None:
        """Waits for a fetch that nobody has swapped in, and discards its result."""
        if self.back_buffer is None and self._last_fetch is not None:
            await self._last_fetch.done()
            self.back_buffer = self._last_fetch.vector

    async def command(self, command: v1.Command) -> v1.CommandResult:
        """Sends a command to all shards, and adds up the scalars of their results.

        Each shard carries it out exactly once, in the order of this client's commands. If it raises, some shards
        may have carried it out.
        """
        self._sequence += 1
        command.sequence = self._sequence
        links = self._links

        async def ask(_: int, name: str) -> v1.CommandResult:
            return await links.retrying(
                lambda _: links.endpoint.call(
                    name, "command", command, v1.CommandResult, silence_s=links.silence_s
                )
            )

        results = await links.with_each(ask)
        counters: Counter[str] = Counter()
        for result in results:
            counters.update(dict(result.counters))
        return v1.CommandResult(
            scalar=sum(result.scalar for result in results),
            min_version=min(result.min_version for result in results),
            max_version=max(result.max_version for result in results),
            counters=counters,
            clock=max(result.clock for result in results),
        )

    async def pause(self) -> None:
        """Has the shards cease to wait for this worker's clock: it has nothing to do. Call `flush` before."""
        await self.command(v1.Command(kind=v1.Command.LEAVE))

    async def resume(self) -> None:
        """Takes part again, at this worker's clock or at that of the slowest worker if that is later."""
        clock = -1
        while clock != self.clock:  # the second time, all shards are told the latest of their clocks
            clock = self.clock
            result = await self.command(v1.Command(kind=v1.Command.ENTER, clock=clock))
            self.clock = max(clock, result.clock)

    async def assign(self, vector: Vector) -> None:
        """Pushes initial parameters, version 0 of every chunk that has none yet; other chunks keep theirs."""
        zero = [0] * self.chunks.num_chunks
        update = Update(vector, samples=0, lr=0.0, base_version=zero, assign=True)
        await self.push_soon(update)
        await self.flush()


async def _at_once(made: Mapping[int, UpdatePiece]) -> Mapping[int, UpdatePiece]:
    return made
