"""The worker's side of the parameter server.

A worker's verbs on one chunk take effect in the order it issued them: a fetch sees the worker's
own pushes before it, and a push of a chunk waits until the fetch before it has landed. Other chunks,
and different shards, run independently, so both directions of the network are busy at once.

Every exchange is retried until `retry_s` have passed without progress: a push under its own
sequence number, so that it is applied once, whatever happened to the first try.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

from gradstream.errors import ClosedError, DeadlineError, InternalError, PeerLostError, RefusedError
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Progress, Runtime, awaited_later
from gradstream.server.arrival import Arrival, Patch
from gradstream.server.chunks import ChunkMap
from gradstream.server.rows import RowMap
from gradstream.server.traffic import LinkTraffic, Traffic, Transfer
from gradstream.server.update import Piece, Update
from gradstream.server.waits import Claims, Kind
from gradstream.transport.base import Endpoint, Lent, Stream
from gradstream.wire import v1
from gradstream.wire.dtypes import to_wire
from gradstream.wire.frames import ABSENT

__all__ = ["ServerClient", "names_of"]

RETRYABLE_CODES = frozenset({"STALE_EPOCH", "SUPERSEDED"})


class ServerClient:
    """All shards, as one server.

    Args:
        runtime: of this worker's node.
        endpoint: of this worker's node.
        shards: their node names, in the order of the chunk map.
        chunks: the chunk map.
        spare: where the first fetch lands.
        silence_s: how long a shard may be silent. One that waits for others is not silent.
        retry_s: how long an exchange is retried without any progress.
        on_transfer: told of each push and fetch that is done.
        rows: of every chunk, where only what has changed is exchanged; None exchanges whole chunks.

    Attributes:
        known: by chunk, the version that the replica's parameters are of; -1 for none. With `rows`, a fetch
            is a `Patch` of these.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        shards: Sequence[str],
        chunks: ChunkMap,
        spare: Vector,
        *,
        silence_s: float,
        retry_s: float,
        on_transfer: Callable[[Transfer], None] | None = None,
        rows: RowMap | None = None,
    ) -> None:
        self.chunks = chunks
        self.rows = rows
        self.known: Sequence[int] = [-1] * chunks.num_chunks
        self.spare: Vector | None = spare
        self.claims = Claims()
        self.clock = 0
        self._runtime = runtime
        self._endpoint = endpoint
        self._shards = [(rank, name) for rank, name in enumerate(shards) if chunks.chunks_of(rank)]
        self.traffic = Traffic({name: LinkTraffic() for _, name in self._shards})
        self._on_transfer = on_transfer
        self._silence_s = silence_s
        self._retry_s = retry_s
        self._jitter = runtime.random("retry")
        self._sequence = 0  # of the push or command issued last
        self._last_push = 0  # of the push issued last
        self._pushing: asyncio.Task[None] | None = None
        self._pushed: Vector | None = None  # by the push started last
        self._last_fetch: Arrival | None = None
        self._num_fetches = 0

    # ---- verbs --------------------------------------------------------------------------

    async def push_soon(self, update: Update, *, tick: bool = False) -> None:
        """Starts a push, once the one before it is done.

        Args:
            update: what is pushed; one of nothing is done at once.
            tick: it makes this worker's clock one later.

        Raises:
            What the push before failed with: it may have been applied to some chunks.
        """
        await self.settle()
        if update.vector is None and update.num_gradients == 0:  # nothing was accumulated
            if update.on_done is not None:
                update.on_done()
            return
        if tick:
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
        self._pushing = awaited_later(self._runtime.spawn(self._push(update, sequence, before), name=name))

    def settle(self) -> Coroutine[Any, Any, None]:
        """Returns once the push started last, as of this call, is acknowledged by every shard.

        Raises:
            What that push failed with.
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
        """Starts a fetch of all parameters into the spare vector; whoever adopts it leaves another.

        Each chunk is one version, at least `min_version`. Where what was pushed last lies in that vector,
        that push is waited for first.

        Args:
            min_version: an older one is not sent.
            own: all own pushes before it are applied to it, or are in the server's sum; else it may
                overtake them.
            flush: what the server's sums hold is applied to it, though no update is due.
            min_clock: so many updates, at least, of every worker that takes part are in it.
            vector: a state vector of the update rule is fetched, and not the parameters.

        Raises:
            InternalError: the fetch before was not adopted yet, so there is no spare vector.
        """
        if self.spare is None:
            raise InternalError("a second fetch before the first was adopted: there is one spare vector")
        arrival, self.spare = self._arrival(self.spare), None
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
        free = self.settle() if self._pushed is arrival.vector else None
        arrival.task = awaited_later(self._runtime.spawn(self._fetch(arrival, terms, free), name=name))
        self._last_fetch = arrival
        return arrival

    def _arrival(self, vector: Vector) -> Arrival:
        if self.rows is None:
            return Arrival(vector, self.chunks.num_chunks)
        return Patch(self.rows, self.known, vector.tensor.dtype, vector)

    async def fetch_into(self, vector: Vector) -> None:
        """Fetches all parameters as they are now, beside the verbs above and in no order with them.

        Not to compute gradients on: a shard that keeps what this worker has read last does not take note.
        """
        await self._fetch(Arrival(vector, self.chunks.num_chunks), v1.Fetch())

    async def reclaim_spare(self) -> None:
        """Waits for a fetch that nobody adopted, and forgets what it brought."""
        if self.spare is None and self._last_fetch is not None:
            await self._last_fetch.done()
            self.spare = self._last_fetch.vector

    async def command(self, command: v1.Command) -> v1.CommandResult:
        """The same command on all shards; scalars are added up.

        Carried out exactly once on each shard, in the order of one client's commands. If it
        raises, some shards may have carried it out.
        """
        self._sequence += 1
        command.sequence = self._sequence
        results: list[v1.CommandResult] = [v1.CommandResult() for _ in self._shards]

        async def ask(index: int, name: str) -> None:
            async def attempt(progressed: Callable[[], None]) -> None:
                del progressed
                results[index] = await self._endpoint.call(
                    name, "command", command, v1.CommandResult, silence_s=self._silence_s
                )

            await self._retrying(name, attempt)

        await self._runtime.gather(*(ask(i, name) for i, (_, name) in enumerate(self._shards)))
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

    async def leave(self) -> None:
        """This worker has nothing to do for now: nobody waits for its clock. Its pushes are settled."""
        await self.command(v1.Command(kind=v1.Command.LEAVE))

    async def enter(self) -> None:
        """This worker takes part again: at its own clock, or at that of the slowest if that is later."""
        clock = -1
        while clock != self.clock:  # the second time all shards are told the latest of theirs
            clock = self.clock
            result = await self.command(v1.Command(kind=v1.Command.ENTER, clock=clock))
            self.clock = max(clock, result.clock)

    async def assign(self, vector: Vector) -> None:
        """Hands out initial parameters: version 0 of every chunk that has none yet. Others keep theirs."""
        zero = [0] * self.chunks.num_chunks
        update = Update(vector, samples=0, learning_rate=0.0, basis=zero, assign=True)
        await self.push_soon(update)
        await self.settle()

    # ---- push ---------------------------------------------------------------------------

    async def _push(self, update: Update, sequence: int, before: Arrival | None) -> None:
        vector, begun_ns = update.vector, self._runtime.now()
        pieces = None if update.pieces is None else await update.pieces()
        # What is still being computed is lent chunk by chunk, as it is sent.
        whole = update.ready is None and vector is not None
        to = f"{self._runtime.node}: push {sequence}"
        with vector.all.borrowed(write=False, to=to) if whole and vector else nullcontext():
            await self._runtime.gather(
                *(self._push_to(rank, name, update, pieces, sequence, before) for rank, name in self._shards)
            )
        self.traffic.pushes += 1
        self._report("push", begun_ns, _size_bytes(vector, pieces))
        if update.on_done is not None:
            update.on_done()

    async def _push_to(
        self,
        rank: int,
        name: str,
        update: Update,
        pieces: Mapping[int, Piece] | None,
        sequence: int,
        before: Arrival | None,
    ) -> None:
        left = dict.fromkeys(self.chunks.chunks_of(rank))
        lent: list[Lent] = []

        async def attempt(progressed: Callable[[], None]) -> None:
            if not left:
                return  # answered in full just before the stream broke
            await self._ready(update, next(iter(left)))
            # Not earlier: a loop of the user's says how many samples it took when the gradient is there.
            request = v1.Push(
                command=v1.Push.ASSIGN if update.assign else v1.Push.APPLY,
                sequence=sequence,
                samples=update.samples,
                learning_rate=update.learning_rate,
                round=update.round,
                num_gradients=update.num_gradients,
                clock=update.clock,
                loss=update.loss,
                vector=update.target,
                rows=pieces is not None,
                basis=0 if pieces is None else max(0, min(update.basis)),
            )
            opened_ns = self._runtime.now()
            stream = await self._endpoint.open(name, "push", request)
            sent = Progress()
            try:
                await self._runtime.gather(
                    self._send_chunks(stream, update, pieces, sequence, list(left), before, sent, lent),
                    self._take_results(stream, update, left, sent, progressed, opened_ns),
                )
            finally:
                stream.cancel("done")

        await self._retrying(name, attempt)
        for one in lent:  # what was answered is read no more; all but the word of it is here
            await one.back(self._silence_s)

    async def _ready(self, update: Update, chunk: int) -> None:
        if update.ready is not None:
            await update.ready.reached(self.chunks.bounds(chunk)[1])

    async def _send_chunks(
        self,
        stream: Stream,
        update: Update,
        pieces: Mapping[int, Piece] | None,
        sequence: int,
        chunks: Sequence[int],
        before: Arrival | None,
        sent: Progress,
        lent: list[Lent],
    ) -> None:
        link = self.traffic.links[stream.peer]
        for count, chunk in enumerate(chunks, start=1):
            await self._ready(update, chunk)
            if before is not None:
                await before.landed(chunk)
            start, stop = self.chunks.bounds(chunk)
            header = v1.Chunk(
                index=chunk, sequence=sequence, elems=stop - start, version=max(0, update.basis[chunk])
            )
            span: Span | None = None
            if update.vector is None:
                header.flags = ABSENT
            else:
                itemsize_bytes = update.vector.tensor.element_size()
                link.whole_pushed_bytes += (stop - start) * itemsize_bytes
                if pieces is not None and chunk not in pieces:
                    continue  # not sent, and so absent
                span = update.vector[start:stop] if pieces is None else pieces[chunk].payload
                header.rows = 0 if pieces is None else pieces[chunk].num_rows
                header.elems = len(span)
                header.dtype = to_wire(update.vector.tensor.dtype)
                link.pushed_bytes += len(span) * itemsize_bytes
            if span is None:
                await stream.send(v1.Frame(chunk=header), None, self._silence_s)  # its Open may be lost
            else:
                lent.append(await stream.lend(v1.Frame(chunk=header), span, self._silence_s))
            sent.advance(count)
        await stream.end()
        sent.advance(len(chunks))

    async def _take_results(
        self,
        stream: Stream,
        update: Update,
        left: dict[int, None],
        sent: Progress,
        progressed: Callable[[], None],
        opened_ns: int,
    ) -> None:
        taken, staleness = 0, self.traffic.links[stream.peer].staleness
        while left:
            await sent.reached(taken + 1)  # silence counts only while an answer is due
            received = await stream.recv(self._silence_s)
            if received is None:
                raise PeerLostError(stream.peer, f"ended a push with {len(left)} chunks unanswered")
            results = v1.PushResults.FromString(received.frame.body.data)
            for chunk in results.absent:
                taken += 1
                left.pop(chunk, None)
            for result in results.results:
                taken += 1
                left.pop(result.chunk, None)
                if result.outcome == v1.PushResult.APPLIED:
                    staleness[result.staleness] += 1
                update.late = update.late or result.outcome == v1.PushResult.DROPPED
                self._claim(result, opened_ns)
            self.claims.note(Kind.SHARD, stream.peer, opened_ns, self._runtime.now())
            progressed()

    # ---- fetch --------------------------------------------------------------------------

    async def _fetch(
        self, arrival: Arrival, terms: v1.Fetch, free: Coroutine[Any, Any, None] | None = None
    ) -> None:
        begun_ns = self._runtime.now()
        try:
            if free is not None:
                await free
            with arrival.borrowed(f"{self._runtime.node}: fetch"):
                await self._runtime.gather(
                    *(self._fetch_from(rank, name, arrival, terms) for rank, name in self._shards)
                )
            self.traffic.fetches += 1
            self._report("fetch", begun_ns, arrival.size_bytes)
        finally:
            for chunk in range(self.chunks.num_chunks):
                arrival.release(chunk)

    async def _fetch_from(self, rank: int, name: str, arrival: Arrival, terms: v1.Fetch) -> None:
        left, link = dict.fromkeys(self.chunks.chunks_of(rank)), self.traffic.links[name]

        tries = itertools.count()

        async def attempt(progressed: Callable[[], None]) -> None:
            request = v1.Fetch()
            request.CopyFrom(terms)
            request.chunks.extend(left)
            request.known.extend(1 + known for chunk in left if (known := arrival.known(chunk)) is not None)
            request.attempt = next(tries)
            opened_ns = self._runtime.now()
            stream = await self._endpoint.open(name, "fetch", request)
            stream.land(
                lambda header: (
                    arrival.place(header, *self.chunks.bounds(header.index)) if header.index in left else None
                )
            )
            try:
                while left:
                    received = await stream.recv(self._silence_s)
                    if received is None:
                        raise PeerLostError(name, f"ended a fetch with {len(left)} chunks missing")
                    if received.frame.HasField("body") and isinstance(arrival, Patch):
                        unchanged = v1.Unchanged.FromString(received.frame.body.data)
                        for chunk, version in zip(unchanged.chunks, unchanged.versions, strict=False):
                            self._expected(name, chunk, left)
                            arrival.unchanged(name, chunk, version)
                            link.whole_fetched_bytes += self._chunk_bytes(chunk, arrival)
                    else:
                        header, before_bytes = received.frame.chunk, arrival.size_bytes
                        self._expected(name, header.index, left)
                        bounds = self.chunks.bounds(header.index)
                        arrival.take(name, header, *bounds, received.payload, received.landed)
                        link.fetched_bytes += arrival.size_bytes - before_bytes
                        link.whole_fetched_bytes += self._chunk_bytes(header.index, arrival)
                        self._claim(header, opened_ns)
                    self.claims.note(Kind.SHARD, name, opened_ns, self._runtime.now())
                    progressed()
            finally:
                stream.cancel("done")

        await self._retrying(name, attempt)

    def _expected(self, name: str, chunk: int, left: dict[int, None]) -> None:
        """An answer of this chunk has come: it was asked for, and is not any more."""
        if chunk not in left:
            raise RefusedError(name, "BAD_REQUEST", f"sent chunk {chunk}, not asked for")
        del left[chunk]

    def _chunk_bytes(self, chunk: int, arrival: Arrival) -> int:
        """All of a chunk."""
        start, stop = self.chunks.bounds(chunk)
        return (stop - start) * arrival.vector.tensor.element_size()

    # ---- accounts -----------------------------------------------------------------------

    def _claim(self, answer: v1.Chunk | v1.PushResult, opened_ns: int) -> None:
        """Notes for which worker an answer had to wait."""
        if answer.HasField("waited"):
            end_ns = opened_ns + 1000 * answer.waited.until_us
            self.claims.note(Kind.WORKER, answer.waited.on, opened_ns, end_ns)

    def _report(self, kind: Literal["push", "fetch"], begun_ns: int, size_bytes: int) -> None:
        if self._on_transfer is not None:
            self._on_transfer(Transfer(kind, (self._runtime.now() - begun_ns) / 1e9, size_bytes))

    # ---- retries ------------------------------------------------------------------------

    async def _retrying(self, peer: str, attempt: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Tries until it works, or `retry_s` have passed since anything last did."""
        last_ns, pause_s = self._runtime.now(), 0.02

        def progressed() -> None:
            nonlocal last_ns, pause_s
            last_ns, pause_s = self._runtime.now(), 0.02

        while True:
            try:
                return await attempt(progressed)
            except (PeerLostError, DeadlineError, ClosedError) as error:
                failure: Exception = error
            except RefusedError as error:
                if error.code not in RETRYABLE_CODES:
                    raise
                failure = error
            self.traffic.retries += 1
            if (self._runtime.now() - last_ns) / 1e9 + pause_s > self._retry_s:
                raise failure
            await self._runtime.sleep(pause_s * (0.5 + self._jitter.random()))
            pause_s = min(1.0, 2 * pause_s)


async def _at_once(made: Mapping[int, Piece]) -> Mapping[int, Piece]:
    return made


def _size_bytes(vector: Vector | None, pieces: Mapping[int, Piece] | None) -> int:
    """Bytes of a push."""
    if vector is None:
        return 0
    if pieces is None:
        return vector.tensor.nbytes
    return sum(len(piece.payload) for piece in pieces.values()) * vector.tensor.element_size()


def names_of(nodes: Iterable[v1.Node], role: str) -> list[str]:
    """Names of the nodes of a role, in the order of their ranks."""
    return [node.name for node in sorted(nodes, key=lambda node: node.rank) if node.role == role]
