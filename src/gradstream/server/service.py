"""A shard on the network: thin I/O around `ShardState` and `Store`.

Serves "push", "fetch" and "command" (see wire/v1.proto). Applying runs on the node's arithmetic
thread; a chunk is read only between two updates, so what a fetch gets of a chunk is one version.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from gradstream.errors import ConfigError, GradstreamError, RefusedError
from gradstream.memory import Span, Vector
from gradstream.optim.base import Optimizer, skips_zeros
from gradstream.optim.groups import GroupedRule
from gradstream.runtime.base import Runtime
from gradstream.server.agreement import Agreement
from gradstream.server.chunks import ChunkMap
from gradstream.server.commands import Commands
from gradstream.server.correction import SenderStates
from gradstream.server.inspection import Inspection
from gradstream.server.latecomers import Latecomers
from gradstream.server.order import Change, Fetched, Updating
from gradstream.server.quorum import Verdict
from gradstream.server.readers import Readers
from gradstream.server.row_store import ChangedRows, Part, elements_of
from gradstream.server.rows import RowMap, RowPart, pack
from gradstream.server.rule import Contribution, FetchTerms
from gradstream.server.shard import (
    Acknowledge,
    Apply,
    Instruction,
    Parked,
    Release,
    ShardState,
    Supersede,
)
from gradstream.server.shard_config import ShardConfig
from gradstream.server.store import Store
from gradstream.server.updates import Updates
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1
from gradstream.wire.dtypes import from_wire, to_wire

__all__ = ["ShardService"]

_WRITING = (v1.Command.COPY, v1.Command.SCALE, v1.Command.ADD)
RESULTS_PER_FRAME = 16
"""Results of a push are gathered: a frame for each would cost as much as a tenth of its chunk."""


@dataclass(slots=True, eq=False)
class _Inbox:
    """A push stream: results that wait to be sent, and chunks that wait for a result."""

    stream: Stream
    opened_ns: int
    results: list[v1.PushResult] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)  # of which nothing came, taken note of and not told yet
    ended: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Outbox:
    """A fetch stream: chunks that may be sent, and chunks that have to wait."""

    reader: str
    fetched: Fetched
    opened_ns: int
    ready: deque[tuple[int, v1.Waited | None]] = field(default_factory=deque)
    waiting: set[int] = field(default_factory=set)
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class ShardService:
    """One shard. `register` it with the model, then it serves.

    Raises nothing itself: bad requests are refused; `failure` is set when an update could not be
    computed, which leaves the parameters undefined and must end the node.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, config: ShardConfig) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._config = config
        self._order = config.order
        self._registered = asyncio.Event()
        self._inboxes: dict[int, _Inbox] = {}
        self._outboxes: dict[int, _Outbox] = {}
        self._elements: dict[tuple[int, int], Part] = {}  # of parked pushes, by (token, chunk)
        self._turns: dict[int, asyncio.Lock] = {}  # by chunk
        self._readers = Readers()
        self._tokens = itertools.count(1)
        self.changed: ChangedRows | None = None  # where only what has changed is exchanged
        self.latecomers = Latecomers()
        self.agreement: Agreement | None = None  # once a model is registered, where there is a quorum
        self.on_verdict: Callable[[Verdict], None] = lambda verdict: None
        self.counters: Counter[str] = Counter()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        endpoint.serve("push", self._push)
        endpoint.serve("fetch", self._fetch)
        endpoint.serve("command", self._command)

    def register(self, model: v1.ModelSpec, *, opens: bool = True) -> None:
        """Allocates for the registered model. From here on every size is known.

        Args:
            opens: begin to serve; else `open` does, once something was restored.
        """
        config = self._config
        self.chunks = ChunkMap(model.elems, model.chunk_elems, config.num_shards)
        optimizer, grouped = config.optimizer, config.grouped
        if model.optimizer:
            if config.find_optimizer is None:
                raise ConfigError("the workers bring an update rule, and this shard has no way to find it")
            optimizer, grouped = config.find_optimizer(model.optimizer)
        dtype = from_wire(model.dtype)
        if dtype is None:
            raise ConfigError(f"the registered model has elements of unknown type {model.dtype}")
        self.store = Store(self._runtime.memory, self.chunks, config.rank, dtype, optimizer, grouped)
        if model.HasField("rows"):
            self._exchange_rows(model.rows, optimizer, grouped)
        here, senders = self.chunks.chunks_of(config.rank), None
        if config.correction is not None:
            memory, elems = self._runtime.memory, self.store.elems
            senders = SenderStates(memory, self.chunks, elems, dtype, config.correction)
        self._updates = Updates(self._runtime, self.store, config.rule, senders, self.changed)
        name = self._endpoint.identity.name
        self._inspection = Inspection(name, self.chunks, here, dtype, self.changed, self.counters)
        self.state = ShardState(here, config.rule, quorum=config.quorum is not None, workers=config.workers)
        self._order.begin(self)
        if config.quorum is not None:
            self.agreement = Agreement(
                self._runtime,
                self._endpoint,
                rank=config.rank,
                needed=config.quorum,
                num_chunks=len(here),
                num_shards=min(config.num_shards, self.chunks.num_chunks),
                waiting_every_s=config.waiting_every_s,
                decided=self._decide,
            )
        self._commands = Commands(
            self._runtime, self.store, self.versions, self._readers.all_gone, self._take_part
        )
        self._endpoint.identity.fingerprint = model.fingerprint
        if opens:
            self.open()

    def _exchange_rows(self, spec: v1.RowSpec, optimizer: Optimizer, grouped: GroupedRule | None) -> None:
        if not skips_zeros(grouped or optimizer):
            raise ConfigError(
                f"{optimizer} moves every parameter at every update, so it cannot be applied to the rows "
                "alone that have a gradient: use SGD without momentum or Adagrad, without weight decay; or "
                "exchange all of them (no row-sparse tensors, no significance)"
            )
        self.changed = ChangedRows(RowMap.of(self.chunks, spec), self.store.dtype)

    def open(self) -> None:
        """Serves from here on."""
        self._registered.set()

    def versions(self) -> list[int]:
        """The version of each chunk; -1 before its initial parameters are there."""
        return [state.version for state in self.state.chunks.values()]

    def parameters_of(self, chunk: int) -> torch.Tensor:
        """A chunk's parameters, as they lie in the store."""
        return self.store.span(self.store.parameters, chunk).tensor

    # ---- push ---------------------------------------------------------------------------

    async def _push(self, stream: Stream) -> None:
        await self._admitted(stream)
        request = v1.Push.FromString(stream.opened.body)
        token, inbox = next(self._tokens), _Inbox(stream, self._runtime.now())
        self._inboxes[token] = inbox
        try:
            await self._runtime.gather(self._take(token, inbox, request), self._answer(inbox))
        finally:
            del self._inboxes[token]

    async def _admitted(self, stream: Stream) -> None:
        """Holds a stream that came before the model was registered; checks the model again."""
        await self._registered.wait()
        theirs, ours = stream.opened.fingerprint, self._endpoint.identity.fingerprint
        if theirs != ours:
            raise RefusedError(
                self._endpoint.identity.name,
                "BAD_FINGERPRINT",
                f"{stream.opened.sender} has model {theirs:016x}, this shard holds {ours:016x}; "
                "every node must run the same job file",
            )

    async def _take(self, token: int, inbox: _Inbox, request: v1.Push) -> None:
        """Reads chunks until the sender has said everything."""
        sender, came = inbox.stream.opened.sender, set()
        while (received := await inbox.stream.recv()) is not None:
            chunk = received.frame.chunk
            part = self._inspection.part(sender, received)
            came.add(chunk.index)
            self._contribute(token, inbox, request, chunk.index, chunk.version, part)
            await self._runtime.sleep(0)  # its update begins now, while what was looked at is in the cache
        if request.rows:
            for index in self.state.chunks:
                if index not in came:
                    inbox.absent.add(index)
                    self._contribute(token, inbox, request, index, request.basis, None)
        inbox.ended = True
        inbox.wake.set()

    def _contribute(
        self, token: int, inbox: _Inbox, request: v1.Push, chunk: int, basis: int, part: Part | None
    ) -> None:
        """Hands one chunk of a push to the state machine; None of what is absent."""
        opened = inbox.stream.opened
        contribution = Contribution(
            sender=opened.sender,
            rank=_rank(opened.sender),
            incarnation=opened.incarnation,
            sequence=request.sequence,
            samples=request.samples,
            num_gradients=request.num_gradients,
            learning_rate=request.learning_rate,
            round=request.round,
            basis=basis,
            absent=part is None,
            clock=request.clock,
            loss=request.loss,
            vector=request.vector,
        )
        if part is not None:
            self._elements[token, chunk] = part
        inbox.pending.add(chunk)
        self.latecomers.came(token, chunk, self._runtime.now())
        assign = request.command == v1.Push.ASSIGN
        parked = Parked(contribution, token, assign)
        self._order.push(chunk, contribution, assign, partial(self._park, chunk, parked))
        if self.agreement is not None and not assign:
            self.agreement.came(request.round, contribution.rank, chunk)

    def _park(self, chunk: int, parked: Parked) -> None:
        self._carry_out(self.state.push(chunk, parked))

    async def _answer(self, inbox: _Inbox) -> None:
        """Sends results, many to a frame, until every chunk has one."""
        absent: set[int] = set()
        while inbox.results or absent != inbox.absent or inbox.pending or not inbox.ended:
            complete = inbox.ended and not inbox.pending
            more = len(inbox.results) < RESULTS_PER_FRAME and not complete
            if more and await self._woken(inbox.stream, inbox.wake, inbox.pending):
                continue
            results, inbox.results = inbox.results, []
            told = inbox.absent - inbox.pending - absent
            absent |= told
            if results or told:
                data = v1.PushResults(results=results, absent=sorted(told)).SerializeToString()
                await inbox.stream.send(v1.Frame(body=v1.Body(data=data)))

    async def _woken(self, stream: Stream, wake: asyncio.Event, chunks: set[int], min_clock: int = 0) -> bool:
        """Waits for news; where none comes, tells the peer whom it waits for, and returns False."""
        try:
            await self._runtime.within(self._config.waiting_every_s, wake.wait())
        except TimeoutError:
            await stream.waiting(list(self.state.awaited(sorted(chunks), min_clock)))
            return False
        wake.clear()
        return True

    # ---- fetch --------------------------------------------------------------------------

    async def _fetch(self, stream: Stream) -> None:
        await self._admitted(stream)
        request, opened = v1.Fetch.FromString(stream.opened.body), stream.opened
        chunks = list(request.chunks) or list(self.state.chunks)
        known = dict(zip(chunks, (version - 1 for version in request.known), strict=False))
        bad = partial(self._inspection.bad, opened.sender)
        if known and self.changed is None:
            raise bad("asks for what has changed, where whole chunks are exchanged")
        if not all(chunk in self.state.chunks for chunk in chunks):
            raise bad(f"asks for chunks {chunks[:8]}... that live elsewhere")
        vector = self.store.vector(request.vector)
        terms = FetchTerms(
            opened.sender,
            opened.incarnation,
            request.min_version,
            request.after_sequence,
            flush=request.flush,
            beside=request.number == 0,
            min_clock=request.min_clock,
        )
        token = next(self._tokens)
        fetched = Fetched(_rank(opened.sender), request.number, request.attempt, acts=request.flush)
        outbox = _Outbox(opened.sender, fetched, self._runtime.now(), waiting=set(chunks))
        self._outboxes[token] = outbox
        unchanged = v1.Unchanged()
        try:
            for chunk in chunks:
                self._order.ask(chunk, fetched, terms, partial(self._ask, chunk, token))
            while outbox.ready or outbox.waiting:
                if not outbox.ready:
                    await _tell(stream, unchanged)
                    await self._woken(stream, outbox.wake, outbox.waiting, terms.min_clock)
                    continue
                chunk, waited = outbox.ready.popleft()
                await stream.credit(self._config.silence_s)
                async with self.turn(chunk):  # one version, until the elements are lent or the carrier's
                    span, rows = self.store.span(vector, chunk), 0
                    version = self.state.version(chunk)
                    clock = self._order.read(chunk, fetched, self.state.clocks.slowest(chunk))
                    if not terms.beside:
                        await self._updates.note_read(terms.sender, chunk, version)
                    numbers = self._changed_since(chunk, known.get(chunk))
                    if numbers is not None and not len(numbers):
                        unchanged.chunks.append(chunk)
                        unchanged.versions.append(version)
                        continue
                    if numbers is not None:
                        span, rows = self._packed(chunk, numbers, span), len(numbers)
                    header = v1.Chunk(
                        index=chunk,
                        elems=len(span),
                        dtype=to_wire(self.store.dtype),
                        version=version,
                        waited=waited,
                        clock=clock,
                        rows=rows,
                    )
                    lent = await stream.lend(v1.Frame(chunk=header), span)
                    if not rows:  # rows were copied
                        self._readers.add(chunk, lent)
            await _tell(stream, unchanged)
        finally:
            del self._outboxes[token]
            self.state.forget(token)

    def _changed_since(self, chunk: int, known: int | None) -> torch.Tensor | None:
        """The rows that are enough for who has a version; None where the whole chunk is to be sent."""
        return None if known is None or self.changed is None else self.changed.since(chunk, known)

    def _packed(self, chunk: int, numbers: torch.Tensor, span: Span) -> Span:
        """The payload of some rows."""
        assert self.changed is not None
        values = span.tensor[self.changed.rows.elements(chunk, numbers)]
        return Vector(f"rows of chunk {chunk}", pack(RowPart(numbers, values))).all

    def _ask(self, chunk: int, token: int, terms: FetchTerms) -> None:
        if token in self._outboxes:
            self._carry_out(self.state.fetch(chunk, terms, token))

    async def flush(self) -> None:
        """Returns once no chunk's sum holds anything that is not in the parameters."""
        chunks = [chunk for chunk, state in self.state.chunks.items() if state.unapplied]
        token, name = next(self._tokens), self._endpoint.identity.name
        fetched = Fetched(self._config.rank, 0, acts=True)
        outbox = self._outboxes[token] = _Outbox(name, fetched, self._runtime.now(), waiting=set(chunks))
        try:
            for chunk in chunks:
                terms = FetchTerms(name, 0, flush=True)
                self._order.ask(chunk, fetched, terms, partial(self._ask, chunk, token))
            while outbox.waiting:
                await outbox.wake.wait()
                outbox.wake.clear()
        finally:
            del self._outboxes[token]
            self.state.forget(token)

    def numbers(self) -> list[int]:
        """The chunks of this shard."""
        return list(self.state.chunks)

    def busy(self, chunk: int) -> bool:
        """Whether a chunk is being updated, or its sum is."""
        return self.state.chunks[chunk].busy

    def version(self, chunk: int) -> int:
        """How many updates a chunk has had; -1 before its initial parameters."""
        return self.state.version(chunk)

    def flush_sum(self, chunk: int) -> None:
        """Applies what a chunk's sum holds, without waiting for it: for an `Order` that knows when."""
        token, name = next(self._tokens), self._endpoint.identity.name
        fetched = Fetched(self._config.rank, 0, acts=True)
        self._outboxes[token] = _Outbox(name, fetched, self._runtime.now(), waiting={chunk})
        self._ask(chunk, token, FetchTerms(name, 0, flush=True))

    def turn(self, chunk: int) -> asyncio.Lock:
        """Updates and readers of a chunk in the order in which they ask: neither starves the other."""
        return self._turns.setdefault(chunk, asyncio.Lock())

    # ---- command ------------------------------------------------------------------------

    async def _command(self, stream: Stream) -> None:
        await self._admitted(stream)
        request = v1.Command.FromString(stream.opened.body)
        if self.changed is not None and not request.out and request.kind in _WRITING:
            raise ConfigError(
                "a command on the parameters, of which only the rows that pushes change are sent"
            )
        result = await self._commands.carry_out(
            stream.opened.sender, stream.opened.incarnation, request, self.counters
        )
        data = result.SerializeToString()
        await stream.send(v1.Frame(body=v1.Body(data=data)))

    def _take_part(self, sender: str, clock: int | None) -> int:
        """A worker is at this clock, or, without one, has nothing to do for now. Returns its clock."""
        change = Change("leave" if clock is None else "enter", (_rank(sender),), clock or 0)
        return self._order.change(change, partial(self.change, change))

    def keep(self, ranks: Collection[int]) -> None:
        """Only these workers are left in the run: nobody waits for the others' clocks."""
        if self.state.clocks.present - set(ranks):
            change = Change("keep", tuple(sorted(ranks)))
            self._order.change(change, partial(self.change, change))

    def change(self, change: Change) -> int:
        """Somebody takes part that did not, or no longer does. Returns the clock of who enters."""
        clocks, clock = self.state.clocks, 0
        match change.kind:
            case "enter":
                clock = clocks.enter(change.ranks[0], change.clock)
            case "leave":
                clocks.leave(change.ranks[0])
            case "keep":
                clocks.keep(change.ranks)
        self._carry_out(self.state.clocks_changed())
        return clock

    def _decide(self, verdict: Verdict) -> None:
        self.on_verdict(verdict)
        self._order.decide(verdict, partial(self.decide, verdict))

    def decide(self, verdict: Verdict) -> None:
        """It is known whose contributions make the update of a round."""
        self._carry_out(self.state.decide(verdict))

    # ---- instructions of the state machine ----------------------------------------------

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Apply(chunk):
                    if instruction.update:
                        self.latecomers.completed(instruction)
                    self._order.update(self._updating(instruction), partial(self._begin, instruction))
                case Acknowledge():
                    self._acknowledge(instruction)
                case Release(token, chunk):
                    outbox = self._outboxes[token]  # type: ignore[index]  # tokens are our ints
                    self._order.release(chunk, outbox.fetched, partial(self._release, outbox, chunk))
                case Supersede(token, chunk):
                    self._forget(token, chunk)
                    inbox = self._inboxes.get(token)  # type: ignore[call-overload]
                    if inbox is not None:
                        inbox.stream.refuse(v1.SUPERSEDED, "a retry of this push has taken its place")

    def _updating(self, due: Apply) -> Updating:
        parts = [elements_of(part) for part in self._parts(due)]
        return Updating(due, parts, self.parameters_of(due.chunk))

    def _parts(self, due: Apply) -> list[Part]:
        present = [held for held in due.update if not held.contribution.absent]
        return [self._elements[held.token, due.chunk] for held in present]  # type: ignore[index]

    def _begin(self, due: Apply) -> None:
        nothing = due.update and not due.summed and all(held.contribution.absent for held in due.update)
        if nothing and self.changed is not None and not self.turn(due.chunk).locked():
            self._carry_out(self._applied(due))  # no arithmetic, which is so for most chunks of a sparse push
        else:
            self._runtime.spawn(self._apply(due), name=f"apply-{due.chunk}")

    def _release(self, outbox: _Outbox, chunk: int) -> None:
        outbox.waiting.discard(chunk)
        waited = self.latecomers.waited(chunk, outbox.reader, outbox.opened_ns)
        outbox.ready.append((chunk, waited))
        outbox.wake.set()

    def _acknowledge(self, done: Acknowledge) -> None:
        self.counters[done.outcome] += 1
        self._forget(done.token, done.chunk)
        inbox = self._inboxes.get(done.token)  # type: ignore[call-overload]
        if inbox is None:
            return  # the sender is gone, or retries on another stream
        inbox.pending.discard(done.chunk)
        applied, by = done.outcome == "applied", inbox.stream.opened.sender
        if done.chunk in inbox.absent and done.outcome != "dropped":
            inbox.wake.set()
            return
        inbox.absent.discard(done.chunk)
        inbox.results.append(
            v1.PushResult(
                chunk=done.chunk,
                sequence=done.sequence,
                outcome=done.outcome.upper(),
                version=done.version,
                staleness=max(0, done.staleness),
                waited=self.latecomers.waited(done.chunk, by, inbox.opened_ns) if applied else None,
            )
        )
        inbox.wake.set()

    def _forget(self, token: Hashable, chunk: int) -> None:
        self._elements.pop((token, chunk), None)  # type: ignore[arg-type]  # tokens are our ints
        self.latecomers.gone(token, chunk)

    async def _apply(self, due: Apply) -> None:
        async with self.turn(due.chunk):
            if due.completes:
                await self._readers.gone(due.chunk)
            try:
                await self._updates.compute(due, self._parts(due))
            except Exception as error:
                if not self.failure.done():
                    self.failure.set_exception(error)
                return
            instructions = self._applied(due)
        following = [one for one in instructions if isinstance(one, Apply)]
        self._carry_out(one for one in instructions if not isinstance(one, Apply))
        if following:
            await self._runtime.sleep(0)  # who was just let go reads before the next update
            self._carry_out(following)

    def _applied(self, due: Apply) -> list[Instruction]:
        """An update is in the parameters."""
        updating = self._updating(due)
        instructions = self.state.applied(due.chunk)
        self._order.updated(updating)
        return instructions

    async def failed(self) -> None:
        """Waits for an update that cannot be computed, and raises its error."""
        try:
            await asyncio.shield(self.failure)
        except GradstreamError:
            raise
        except Exception as error:
            raise GradstreamError(f"{self._endpoint.identity.name}: an update failed: {error}") from error


async def _tell(stream: Stream, unchanged: v1.Unchanged) -> None:
    """Sends what has been gathered, if anything."""
    if unchanged.chunks:
        await stream.send(v1.Frame(body=v1.Body(data=unchanged.SerializeToString())))
        unchanged.Clear()


def _rank(sender: str) -> int:
    return int(sender.rpartition("-")[2])
