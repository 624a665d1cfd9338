"""The worker's side of the parameter server.

A worker's operations on a chunk take effect in the order of the calls: a fetch sees the worker's earlier pushes, and a
push of a chunk waits until the previous fetch of it has arrived. Different chunks and shards are independent, so both
directions of the network are busy at once.

The client retries every exchange until `Deadlines.retry_s` have passed without progress. A push keeps its sequence
number, so each shard applies it once, however many attempts arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from gradstream.codec.base import Codec, Encoder
from gradstream.errors import InternalError
from gradstream.memory import Vector
from gradstream.runtime.base import awaited_later
from gradstream.server.client.fetch import Arrival, SparseDelta, fetch
from gradstream.server.client.links import ShardLinks
from gradstream.server.client.push import PendingPushRequest, PushCodec, SettledPushes, Update
from gradstream.server.procedure import StepResult
from gradstream.server.rows import RowMap
from gradstream.wire import v1


class ServerClient:
    """All shards, as one server.

    Args:
        links: links to the shards.
        back_buffer: vector for the first fetch.
        rows: the rows of every chunk, if workers exchange changed rows; None if they exchange whole chunks.
        encoder: encodes regular pushes; None encodes nothing. Initial parameters, pushes in the name of a lost worker,
            and state of the update rule are never encoded.
        fetch_codec: decodes the parameters of `fetch_soon`, which the shards encode; None if they do not.

    Attributes:
        known: by chunk, the version of the replica's parameters; -1 for none. With `rows`, a fetch is a
            `SparseDelta` against these.
        back_buffer: vector for the next fetch; None until the last fetch is swapped in.
        clock: clock of this worker.
        settled: the pushes whose receipts the coordinator has; None if no worker redoes those of a lost worker.
        traffic, claims: see `ShardLinks`.
    """

    def __init__(
        self,
        links: ShardLinks,
        back_buffer: Vector,
        rows: RowMap | None = None,
        encoder: Encoder | None = None,
        fetch_codec: Codec | None = None,
    ) -> None:
        self.chunks = links.chunks
        self.rows = rows
        self.known: Sequence[int] = [-1] * links.chunks.num_chunks
        self.back_buffer: Vector | None = back_buffer
        self.clock = 0
        self.traffic, self.claims = links.traffic, links.claims
        self._links = links
        self._codec = None if encoder is None else PushCodec(links.runtime, encoder, links.chunks)
        dtype = back_buffer.tensor.dtype
        self._fetched = None if fetch_codec is None else Encoder(fetch_codec, dtype)
        self._sequence = 0  # number of the last push or command
        self._last_push = 0  # number of the last push
        self._pushing: asyncio.Task[None] | None = None
        self._pushed: Vector | None = None  # vector of the last push
        self._pushed_chunks: Sequence[int] | None = None  # its chunks; None for all
        self._last_fetch: Arrival | None = None
        self._num_fetches = 0
        self.settled: SettledPushes | None = None

    # ---- operations ---------------------------------------------------------------------

    async def push_soon(self, update: Update, *, advance_clock: bool = False) -> None:
        """Starts a push, once the previous push is done.

        Args:
            update: the update; without gradients it is done at once, and at most a clock is sent.
            advance_clock: whether the push advances this worker's clock by one.

        Raises:
            GradstreamError: the error of the previous push; some shards may have applied their chunks of it.
        """
        await self.flush()
        nothing = update.vector is None and update.num_gradients == 0  # was accumulated
        if nothing and not (advance_clock and update.refs):
            if update.on_done is not None:
                update.on_done()
            return
        if advance_clock:
            self.clock += 1
            update.clock = self.clock
        pieces = await update.pieces() if update.prompt and update.pieces is not None else None
        self._sequence += 1
        self._last_push = update.sequence = self._sequence
        # Initial parameters cannot wait for a fetch: the fetch may be waiting for them.
        before = None if update.assign else self._last_fetch
        if self.settled is not None:
            self.settled.begin(update)
        self._pushed, self._pushed_chunks = update.vector, update.chunks
        name = f"{self._links.runtime.node}-push-{self._sequence}"
        codec = self._codec
        if codec is not None and (update.assign or update.target or update.stands_for is not None):
            codec = None
        if codec is not None:
            codec.begin(self._sequence)
        push = PendingPushRequest(self._links, update, self._sequence, before, pieces, codec)
        self._pushing = awaited_later(self._links.runtime.spawn(push.run(), name=name))
        self._pushing.add_done_callback(self._push_ended)

    def _push_ended(self, pushing: asyncio.Task[None]) -> None:
        """Ends a fetch with the error of a push: on the shards, it would wait for that push in vain."""
        failure = None if pushing.cancelled() else pushing.exception()
        if failure is not None and self._last_fetch is not None:
            self._last_fetch.fail(failure)

    async def push_beside(self, update: Update) -> None:
        """Pushes an update independently of other operations. Returns once every shard has acknowledged it."""
        self._sequence += 1
        await PendingPushRequest(self._links, update, self._sequence, None, None).run()

    def flush(self) -> Coroutine[Any, Any, None]:
        """Returns once every shard has acknowledged the last push that was started before this call.

        Raises:
            GradstreamError: the error of that push.
        """
        # Takes the task now, not when the caller awaits the result.
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
        chunks: Sequence[int] | None = None,
    ) -> Arrival:
        """Starts a fetch of all parameters, or of some of their chunks, into the back buffer.

        The caller swaps a result of all with its parameters. Each chunk is of one version, at least `min_version`. If
        the back buffer is the vector of the last push, the fetch waits for that push first.

        Args:
            min_version: smallest version that the shards may send.
            own: whether all earlier pushes of this worker must be applied, or be in the server's sum; else the
                fetch may overtake them.
            flush: whether the server first applies its sums, even if no update is due, and sends exact parameters.
            min_clock: the parameters must include this number of updates of every worker.
            vector: name of a state vector of the update rule to fetch; "" for the parameters.
            chunks: numbers of the chunks to fetch; None for all. The others stay as they are in the back buffer.

        Raises:
            InternalError: the previous fetch was not swapped in yet, so there is no back buffer.
            GradstreamError: the error of the previous push.
        """
        if self._pushing is not None and self._pushing.done() and not self._pushing.cancelled():
            self._pushing.result()
        if self.back_buffer is None:
            raise InternalError("a second fetch before the first was swapped in: there is one back buffer")
        encoder = None if flush or vector else self._fetched
        arrival, self.back_buffer = self._arrival(self.back_buffer, chunks, encoder), None
        # A chunk that the last push skipped never has that push: such a fetch begins when the push is done.
        covers = self._pushed_chunks is None or set(arrival.chunks) <= set(self._pushed_chunks)
        self._num_fetches += 1
        terms = v1.Fetch(
            min_version=min_version,
            after_sequence=self._last_push if own and covers else 0,
            number=self._num_fetches,
            flush=flush,
            min_clock=min_clock,
            vector=vector,
        )
        name = f"{self._links.runtime.node}-fetch-after-{self._sequence}"
        free = self.flush() if self._pushed is arrival.vector or (own and not covers) else None
        fetching = fetch(self._links, arrival, terms, free)
        arrival.task = awaited_later(self._links.runtime.spawn(fetching, name=name))
        self._last_fetch = arrival
        return arrival

    def _arrival(self, vector: Vector, chunks: Sequence[int] | None, encoder: Encoder | None) -> Arrival:
        if self.rows is None or chunks is not None:
            return Arrival(vector, self.chunks.num_chunks, chunks, encoder)
        return SparseDelta(self.rows, self.known, vector.tensor.dtype, vector)

    async def fetch_into(self, vector: Vector, name: str = "") -> Sequence[int]:
        """Fetches the current parameters (or a named state vector), independently of other operations.

        Returns their versions.

        Push no gradients that were computed on them: a shard with a correction keeps no copy for this fetch.
        """
        arrival = Arrival(vector, self.chunks.num_chunks)
        await fetch(self._links, arrival, v1.Fetch(vector=name))
        return arrival.versions

    async def reclaim_back_buffer(self) -> None:
        """Waits for a fetch that was not swapped in, and discards its result."""
        if self.back_buffer is None and self._last_fetch is not None:
            await self._last_fetch.done()
            self.back_buffer = self._last_fetch.vector

    async def command(self, command: v1.Command) -> v1.CommandResult:
        """Sends a command to all shards, and joins their results.

        Each shard carries it out exactly once, in the order of this client's commands. If this call raises, some
        shards may have carried the command out.
        """
        self._sequence += 1
        command.sequence = self._sequence
        links = self._links

        async def ask(name: str) -> v1.CommandResult:
            return await links.retrying(
                lambda _: links.endpoint.call(
                    name, "command", command, v1.CommandResult, silence_s=links.silence_s
                )
            )

        results = await links.with_each(ask)
        chunks = [chunk for result in results for chunk in result.chunks]
        chunks.sort(key=lambda one: one.chunk)
        clock = max(result.clock for result in results)
        note, by = _latest_note(results)
        return v1.CommandResult(clock=clock, chunks=chunks, note=note, by=by)

    async def step(self, step: v1.Procedure, commands: Sequence[v1.Command]) -> StepResult:
        """Makes every chunk carry out a step of a procedure, unless it has done so already.

        Args:
            step: its number, its note, and the pass that begins after it.
            commands: the commands of the step.
        """
        command = v1.Command(kind=v1.Command.STEP, step=step, commands=commands)
        return StepResult.of(step.number, await self.command(command))

    async def pause(self) -> None:
        """Stops the shards from waiting for this worker's clock while it has nothing to do. Call `flush` before."""
        await self.command(v1.Command(kind=v1.Command.LEAVE))

    async def resume(self) -> None:
        """Lets the worker take part again, at its own clock or at the slowest worker's clock if that is later."""
        clock = -1
        while clock != self.clock:  # again, so that all shards know the latest of their clocks
            clock = self.clock
            result = await self.command(v1.Command(kind=v1.Command.ENTER, clock=clock))
            self.clock = max(clock, result.clock)

    async def redo(self, update: Update, behalf: v1.Behalf, sequence: int) -> None:
        """Pushes in the name of a lost worker, beside this client's own pushes, until every chunk has the push.

        Chunks that have it already ignore it.

        Raises:
            The error of `ShardLinks.retrying`: some chunks may lack it.
        """
        update.behalf, update.sequence = behalf, sequence
        await PendingPushRequest(self._links, update, sequence, None).run()

    async def assign(self, vector: Vector) -> None:
        """Pushes initial parameters, as version 0 of every chunk that has none; other chunks keep theirs."""
        zero = [0] * self.chunks.num_chunks
        await self.push_soon(Update(vector, samples=0, lr=0.0, base_version=zero, assign=True))
        await self.flush()


def _latest_note(results: Sequence[v1.CommandResult]) -> tuple[bytes, str]:
    """The note of the latest step of a procedure on any shard, and the worker that has sent it."""
    steps = [(max((chunk.number for chunk in result.chunks), default=0), result) for result in results]
    _, latest = max(steps, key=lambda step: step[0], default=(0, v1.CommandResult()))
    return latest.note, latest.by
