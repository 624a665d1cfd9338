"""Carries out a shard's events: the schedule orders them, the state machine answers them with instructions.

    push, fetch, quorum, participation ─▶ EventSchedule ─▶ ShardState ─▶ Apply        to Updates
                                                                      ─▶ Acknowledge  to the PendingPush
                                                                      ─▶ Release      to the PendingFetch

An update that is due and a fetch that is released are events too, so the schedule decides when they happen.
This module reads from no stream and sends nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping

from gradstream.errors import NonFiniteError
from gradstream.memory import Vector
from gradstream.model.base import finite
from gradstream.runtime.base import Runtime, Work
from gradstream.server.aggregation import FetchTerms, PushHeader, rank_of
from gradstream.server.procedure import ACCEPTED, dots_of, names_of, outs_of, perform
from gradstream.server.rows import Part
from gradstream.server.shard.event_schedule import (
    ChunkRead,
    ChunkReleased,
    Event,
    EventSchedule,
    FetchArrived,
    ParticipationChange,
    PushArrived,
    SumFlush,
    UpdateApplied,
    UpdateDue,
)
from gradstream.server.shard.pushes import PendingFetch, PendingPush
from gradstream.server.shard.state import (
    Acknowledge,
    Apply,
    Instruction,
    QuorumDecision,
    Release,
    Sender,
    ShardState,
    Supersede,
    Token,
)
from gradstream.server.shard.store import ShardStore
from gradstream.server.shard.updates import BRIEF_ELEMS, SecondPass, Updates
from gradstream.transport.base import Lent
from gradstream.wire import v1

# ---- stragglers --------------------------------------------------------------------------
# Finds the workers that make others wait at a shard.
#
# An update of several pushes begins when the last of them has arrived, so a node that waits for the update waits for
# the sender of that push. No I/O and no clock: the caller passes times in.


class StragglerTracker:
    """Records which worker's push came last for each update of a chunk, and how much later than the others'."""

    def __init__(self) -> None:
        self._late_ns: Counter[tuple[str, int]] = Counter()  # by sender and chunk
        self._came_ns: dict[tuple[Hashable, int], int] = {}  # by token and chunk
        self._last: dict[int, tuple[str, int]] = {}  # by chunk: sender of the last push, and its time

    def came(self, token: Hashable, chunk: int, now_ns: int) -> None:
        """Notes the time at which a push of a chunk arrived."""
        self._came_ns[token, chunk] = now_ns

    def gone(self, token: Hashable, chunk: int) -> None:
        """Forgets a push that was answered, or that a retry has replaced."""
        self._came_ns.pop((token, chunk), None)

    def completed(self, due: Apply) -> None:
        """Notes that all pushes of an update have arrived."""
        came = [(self._came_ns.get((held.token, due.chunk), 0), held) for held in due.update]
        last_ns, last = max(came, key=lambda pair: pair[0])
        sender = last.header.sender
        self._last[due.chunk] = (sender, last_ns)
        others_ns = [came_ns for came_ns, held in came if held is not last]
        if others_ns:
            self._late_ns[sender, due.chunk] += last_ns - max(others_ns)

    def late_s(self) -> dict[str, float]:
        """By sender, the seconds by which its pushes came after all others so far, on the chunk with most seconds.

        A worker with a slow link is late with its last chunks. A worker that is only the last of many on a shared
        link is late by the time of its own transfer.
        """
        late: dict[str, float] = {}
        for (sender, _), late_ns in self._late_ns.items():
            late[sender] = max(late_ns / 1e9, late.get(sender, 0.0))
        return late

    def waited(self, chunk: int, by: str, opened_ns: int) -> v1.Waited | None:
        """The worker that made a node wait for a chunk's latest update; None if no other worker did.

        Args:
            chunk: number of the chunk.
            by: name of the node that waited.
            opened_ns: time at which the node began to wait, in ns.
        """
        sender, last_ns = self._last.get(chunk, (by, 0))
        if sender == by or last_ns <= opened_ns:
            return None
        return v1.Waited(on=sender, until_us=(last_ns - opened_ns) // 1000)


# ---- chunk leases ------------------------------------------------------------------------
# Keeps a shard from overwriting a chunk that a reader still reads.
#
# A shard sends a chunk to a fetching worker on the same machine without a copy: it lends the memory of the chunk. An
# update writes the same memory, so it waits until the workers have returned the chunk.

MOST_TOGETHER = 16
"""Updates of a chunk that one copy in the backup has, besides the first: their senders wait for it."""

PATIENCE_S = 2.0
"""How long an update waits for a reader, in seconds. Readers copy at once; a hung reader must not delay the others."""


class ChunkLeases:
    """Keeps a lock for each chunk of a shard, and the loans of the chunk that readers have not returned yet.

    A task holds the lock while it updates the chunk or lends it to a reader.
    """

    def __init__(self) -> None:
        self._turns: dict[int, asyncio.Lock] = {}
        self._lent: dict[int, list[Lent]] = {}

    def turn(self, chunk: int) -> asyncio.Lock:
        """The lock of a chunk. Tasks get it in the order in which they asked for it, so none starves."""
        return self._turns.setdefault(chunk, asyncio.Lock())

    def add(self, chunk: int, lent: Lent) -> None:
        """Notes that a chunk is lent to a reader."""
        if not lent.returned:
            left = [one for one in self._lent.get(chunk, ()) if not one.returned]
            self._lent[chunk] = [*left, lent]

    async def gone(self, chunk: int) -> None:
        """Returns when no reader has the chunk any more, so that an update may write it.

        If a reader does not return the chunk within `PATIENCE_S`, its connection is closed.
        """
        for lent in self._lent.pop(chunk, ()):
            await lent.back(PATIENCE_S)


# ---- executor ----------------------------------------------------------------------------


class ShardExecutor:
    """Handles the events of a shard.

    Args:
        runtime: runtime of the shard's node.
        schedule: decides when each event happens.
        state: the state machine.
        store: memory of the chunks.
        updates: arithmetic on that memory.

    Attributes:
        leases: the chunks that are being read; an update of a chunk waits for its readers.
        counters: number of chunks that were pushed, by outcome.
        stragglers: the workers that made others wait.
        keep: backs a chunk up after each update, before anybody sees the result; None without backups.
        on_freed: called after an update while pushes of senders that have left are on their way into chunks.
        thawed: set, except while the shard is held.
        failure: fails with the error of an update that could not be computed; the parameters are undefined
            then, and the node must end.
    """

    def __init__(
        self,
        runtime: Runtime,
        schedule: EventSchedule,
        state: ShardState,
        store: ShardStore,
        updates: Updates,
    ) -> None:
        self._runtime = runtime
        self._schedule = schedule
        self.state = state
        self.store = store
        self.updates = updates
        self.leases = ChunkLeases()
        self.counters = Counter[str]()
        self._members: frozenset[Sender] = frozenset()
        self._lingers = False  # whether a push of a sender that has left is not applied yet
        self._flush_terms = FetchTerms(runtime.node, 0, flush=True)
        self.stragglers = StragglerTracker()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_freed: Callable[[], None] = lambda: None
        self.keep: Callable[[int], Awaitable[None]] | None = None
        self._held: list[Event] = []  # events that wait until the shard is thawed
        self._under_way = 0  # number of updates that have begun
        self._idle = asyncio.Event()
        self._idle.set()
        self.thawed = asyncio.Event()
        self.thawed.set()
        schedule.begin(state)

    # ---- events -------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Passes an event to the schedule, and carries out what happens now; a held shard keeps it for later."""
        if not self.thawed.is_set() and not isinstance(event, ChunkRead):
            self._held.append(event)
            return
        for admitted in self._schedule.admit(event):
            self._obey(self._transition(admitted))

    def hold(self) -> None:
        """Lets nothing happen from now on, but reads and the end of updates that have begun."""
        self.thawed.clear()

    def thaw(self) -> None:
        """Lets all happen that was held, and what comes."""
        self.thawed.set()
        held, self._held = self._held, []
        for event in held:
            self.handle(event)

    async def still(self) -> None:
        """Returns once no update is in progress on a held shard."""
        await self._idle.wait()

    def _transition(self, event: Event) -> Iterable[Instruction]:
        state = self.state
        match event:
            case PushArrived(chunk, parked):
                self.stragglers.came(parked.token, chunk, self._runtime.now())
                return state.push(chunk, parked)
            case UpdateDue():
                return self._begin(event)
            case ChunkReleased(chunk, fetch) if not fetch.over:
                fetch.release(chunk, self.stragglers.waited(chunk, fetch.reader, fetch.opened_ns))
            case ChunkRead(chunk):
                event.clock = state.clocks.slowest(chunk)
            case FetchArrived(chunk, fetch, terms):
                return () if fetch.over else state.fetch(chunk, terms, fetch)
            case SumFlush(chunk):
                return state.fetch(chunk, self._flush_terms, self._own_fetch([chunk]))
            case ParticipationChange():
                self._participate(event)
                return state.clocks_changed()
            case QuorumDecision():
                return state.decide(event)
        return ()

    def _participate(self, change: ParticipationChange) -> None:
        clocks = self.state.clocks
        match change.kind:
            case "enter":
                change.new_clock = clocks.resume(change.ranks[0], change.clock)
            case "leave":
                clocks.pause(change.ranks[0])
            case "keep":
                clocks.keep(change.ranks)

    def _obey(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Apply():
                    self.handle(self._due(instruction))
                case Acknowledge(chunk=chunk, outcome="dropped") if self.keep is not None:
                    dropped = self._acknowledge_dropped(instruction, self.keep)
                    self._runtime.spawn(dropped, name=f"dropped-{chunk}")
                case Acknowledge():
                    self._acknowledge(instruction)
                case Release(token, chunk):
                    assert isinstance(token, PendingFetch)
                    self.handle(ChunkReleased(chunk, token))
                case Supersede(token, chunk, retry):
                    self.stragglers.gone(token, chunk)
                    _push(token).supersede(chunk, _push(retry))

    def _due(self, due: Apply) -> UpdateDue:
        if due.update:
            self.stragglers.completed(due)
        parts = [_push(one.token).parts[due.chunk] for one in due.update if not one.header.empty]
        return UpdateDue(due, parts, self.store.parameters_of(due.chunk))

    def _acknowledge(self, done: Acknowledge) -> None:
        self.counters[done.outcome] += 1
        self.stragglers.gone(done.token, done.chunk)
        push = _push(done.token)
        applied = done.outcome == "applied"
        waited = self.stragglers.waited(done.chunk, push.sender, push.opened_ns) if applied else None
        push.acknowledge(done, waited)

    async def _acknowledge_dropped(self, done: Acknowledge, keep: Callable[[int], Awaitable[None]]) -> None:
        """Has the number of the push backed up first: its sender may ask for parameters after it."""
        async with self.leases.turn(done.chunk):
            try:
                await keep(done.chunk)
            except Exception as error:
                self.fail(error)
                return
        self._acknowledge(done)

    def contributions(self, round: int) -> dict[int, list[tuple[PushHeader, Part | None]]]:  # noqa: A002
        """By chunk, the pushes of a round that wait for it, with their elements; None for an empty one."""
        return {
            chunk: [
                (held.header, _push(held.token).parts.get(chunk))
                for held in state.parked
                if held.header.round == round
            ]
            for chunk, state in self.state.chunks.items()
        }

    # ---- updates ------------------------------------------------------------------------

    def _begin(self, update: UpdateDue) -> Iterable[Instruction]:
        due = update.due
        if (
            self.keep is None
            and self.updates.changes_nothing(due)
            and not self.leases.turn(due.chunk).locked()
        ):
            return self._applied(update)
        self._under_way += 1
        self._idle.clear()
        self._runtime.spawn(self._apply(update), name=f"apply-{due.chunk}")
        return ()

    async def _apply(self, update: UpdateDue) -> None:
        try:
            await self._compute(update)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _compute(self, update: UpdateDue) -> None:
        chunk = update.due.chunk
        try:
            second = await self.updates.prepare(update.due, update.parts)
            async with self.leases.turn(chunk):
                await self._change(update, second)
                told = [] if self.keep is None else await self._kept(update, self.keep)
                told += self._applied(update)
        except Exception as error:
            self.fail(error)
            return
        following = [instruction for instruction in told if isinstance(instruction, Apply)]
        self._obey(instruction for instruction in told if not isinstance(instruction, Apply))
        if following:
            await self._runtime.sleep(0)  # a fetch that was just released reads before the next update
            self._obey(following)

    async def _change(self, update: UpdateDue, second: SecondPass | None) -> None:
        """Computes an update. The caller has the chunk's turn. `second` is what `prepare` has returned."""
        due = update.due
        if due.completes:
            await self.leases.gone(due.chunk)
        try:
            if second is None:
                await self.updates.compute(due, update.parts)
            else:
                await self.updates.finish(due, second)
        except NonFiniteError as error:
            raise self.updates.blamed(due, error) from None

    async def _kept(self, update: UpdateDue, keep: Callable[[int], Awaitable[None]]) -> list[Instruction]:
        """Backs a chunk up after an update, and after those that have come meanwhile: one copy has all.

        Returns:
            What follows from the first of them, once the backup has all. The caller calls `_applied` for the last.
        """
        chunk, told = update.due.chunk, list[Instruction]()
        self.state.commit(chunk)
        for _ in range(MOST_TOGETHER if self.state.joins_updates else 0):
            if not self.thawed.is_set():
                break
            came = self.state.applied(chunk)
            told += [instruction for instruction in came if not isinstance(instruction, Apply)]
            following = [instruction for instruction in came if isinstance(instruction, Apply)]
            if not following:
                self.state.hold(chunk)  # nobody sees anything before the backup has it
                break
            further = self._due(following[0])
            await self._change(further, await self.updates.prepare(further.due, further.parts))
            self.state.commit(chunk)
        await keep(chunk)
        return told

    def fail(self, error: Exception) -> None:
        """Ends the shard with an error: see `failure`."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def _applied(self, update: UpdateDue) -> list[Instruction]:
        instructions = self.state.applied(update.due.chunk)
        if self._lingers:
            self._free_states()
            self.on_freed()
        self.handle(UpdateApplied(update))
        return instructions

    def commanded(self, chunk: int) -> None:
        """Takes note that a command has changed a chunk's parameters."""
        self._obey(self.state.commanded(chunk))

    # ---- fetches ------------------------------------------------------------------------

    def forget(self, fetch: PendingFetch) -> None:
        """Ends a fetch: the executor releases no more chunks to it."""
        fetch.over = True
        self.state.forget(fetch)

    async def flush(self) -> None:
        """Applies all sums. Returns once every push that was acknowledged is in the parameters."""
        chunks = [chunk for chunk, state in self.state.chunks.items() if state.unapplied]
        fetch = self._own_fetch(chunks)
        try:
            for chunk in chunks:
                self.handle(FetchArrived(chunk, fetch, self._flush_terms))
            await fetch.emptied()
        finally:
            self.forget(fetch)

    def _own_fetch(self, chunks: Iterable[int]) -> PendingFetch:
        """A fetch that the shard makes itself, to have sums applied."""
        return PendingFetch(
            self._runtime.node,
            number=0,
            attempt=0,
            flushes=True,
            opened_ns=self._runtime.now(),
            waiting=set(chunks),
        )

    # ---- members ------------------------------------------------------------------------

    def keep_workers(self, ranks: Collection[int]) -> None:
        """Stops waiting for the clocks of all other workers: they have left the run. These ones may take part."""
        if self.state.clocks.lacks(ranks):
            self.handle(ParticipationChange("keep", tuple(sorted(ranks))))

    def keep_senders(self, members: Collection[Sender], fenced: Collection[Sender] = ()) -> None:
        """Frees the state of all other senders, once their pushes are applied; see `ShardState.keep_senders`."""
        self._members = frozenset(members)
        self.state.keep_senders(self._members, fenced)
        self._free_states()

    def _free_states(self) -> None:
        lingering = self.state.lingering
        self._lingers = bool(lingering)
        self.updates.keep_senders({name for name, _ in self._members} | lingering)


def _push(token: Token) -> PendingPush:
    """The push that a token stands for."""
    assert isinstance(token, PendingPush)
    return token


# ---- commands ----------------------------------------------------------------------------
# Commands of workers to a shard: to be waited for or not, and the steps of a procedure.
#
# A worker sends the same command to all shards. Each shard carries it out exactly once per (sender, incarnation,
# sequence): a retry gets the first result again.
#
# A step goes from chunk to chunk, and takes its turn at each as an update does. Fetches and updates of the other chunks
# continue meanwhile. A fetch gets each chunk either before the step or after it. Each chunk carries a step out for the
# first worker that brings it, and the shard carries out one step at a time.

KEPT_RESULTS = 8
"""Results that are kept of each sender; a client has a few commands in flight."""


class Commands:
    """Carries out commands.

    Args:
        runtime: runtime of the shard's node.
        executor: has the vectors, and is told which chunks a step has changed, and which workers take part.

    Attributes:
        turn: lock that each step holds; no step is half done while another task holds it.
    """

    def __init__(self, runtime: Runtime, executor: ShardExecutor) -> None:
        self._runtime = runtime
        self._executor = executor
        self.turn = asyncio.Lock()
        self._results: dict[Sender, OrderedDict[int, asyncio.Task[v1.CommandResult]]] = {}

    async def carry_out(self, sender: str, incarnation: int, command: v1.Command) -> v1.CommandResult:
        """Carries a command out unless that was done before, and returns its result.

        Args:
            sender: node name of the worker.
            incarnation: incarnation of the worker.
            command: the command: LEAVE, ENTER or STEP.

        Raises:
            NonFiniteError: a step has made an element NaN or infinite. The shard cannot continue.
        """
        results = self._results.setdefault((sender, incarnation), OrderedDict())
        if command.sequence not in results:
            name = f"command-{sender}-{command.sequence}"
            results[command.sequence] = self._runtime.spawn(self._do(sender, command), name=name)
            while len(results) > KEPT_RESULTS:
                results.popitem(last=False)
        return await asyncio.shield(results[command.sequence])

    def keep_senders(self, members: Collection[Sender]) -> None:
        """Frees the results of all other senders: they have left and never ask again."""
        self._results = {sender: kept for sender, kept in self._results.items() if sender in members}

    async def _do(self, sender: str, command: v1.Command) -> v1.CommandResult:
        await self._executor.thawed.wait()
        if command.kind == v1.Command.STEP:
            return await self._step(sender, command)
        enters = command.kind == v1.Command.ENTER
        change = ParticipationChange(
            "enter" if enters else "leave", (rank_of(sender),), command.clock if enters else 0
        )
        self._executor.handle(change)
        return v1.CommandResult(clock=change.new_clock)

    # ---- steps of a procedure -----------------------------------------------------------

    async def _step(self, sender: str, command: v1.Command) -> v1.CommandResult:
        """Carries a step out on each chunk that has not got so far, and reports where all chunks are.

        A chunk that has a step and one that has not may be mixed when a sender died: the next one completes it.
        """
        while True:
            await self._executor.thawed.wait()
            async with self.turn:
                if self._executor.thawed.is_set():
                    return await self._step_in_turn(sender, command)

    async def _step_in_turn(self, sender: str, command: v1.Command) -> v1.CommandResult:
        executor, step = self._executor, command.step
        vectors = {name: executor.store.vector(name) for name in names_of(command.commands)}
        note, by, latest, chunks = b"", "", 0, []
        for chunk in executor.store.here:
            async with executor.leases.turn(chunk):
                procedure = executor.state.chunks[chunk].procedure
                if procedure.number < step.number:
                    scalars = await self._compute(sender, command, vectors, chunk)
                    procedure.number, procedure.scalars = step.number, scalars
                    procedure.note, procedure.by = step.note, sender
                    procedure.accepted = procedure.accepted or ACCEPTED in outs_of(command.commands)
                    if step.pass_number:
                        procedure.begin(step.pass_number)
                    if "" in outs_of(command.commands):
                        executor.commanded(
                            chunk
                        )  # readers wait for this turn: the backup has the new version first
                    if executor.keep is not None:
                        await executor.keep(chunk)
                chunks.append(procedure.summary(chunk))
                if procedure.number > latest:
                    latest, note, by = procedure.number, procedure.note, procedure.by
        return v1.CommandResult(chunks=chunks, note=note, by=by)

    async def _compute(
        self, sender: str, step: v1.Command, vectors: Mapping[str, Vector], chunk: int
    ) -> list[float]:
        """Carries the commands of a step out on a chunk, one after the other. The caller has the chunk's turn.

        Returns:
            The chunk's part of each dot product, in the order of the commands.
        """
        store, commands = self._executor.store, step.commands
        outs = outs_of(commands)
        spans = {name: store.span(vector, chunk) for name, vector in vectors.items()}
        if not spans:
            return []
        if outs:
            await self._executor.leases.gone(chunk)
        elems = len(next(iter(spans.values()))) * len(commands)

        def arithmetic(_: object) -> list[float]:
            scalars = perform(commands, {name: span.tensor for name, span in spans.items()})
            if wrong := [name or "the parameters" for name in outs if not finite(spans[name].tensor)]:
                where = f"chunk {chunk}, step {step.step.number} of the procedure, sent by {sender}"
                raise NonFiniteError(
                    f"{where}: it has made elements of {', '.join(wrong)} NaN or infinite", culprit=sender
                )
            return scalars

        try:
            scalars = await self._runtime.compute(
                arithmetic,
                work=Work("apply", elems=elems, brief=elems <= BRIEF_ELEMS),
                reads=[span for name, span in spans.items() if name not in outs],
                writes=[spans[name] for name in outs],
                shape_only=[0.0] * dots_of(commands),
            )
        except NonFiniteError as error:
            self._executor.fail(error)
            raise
        store.headroom.forget(chunk)
        return scalars
