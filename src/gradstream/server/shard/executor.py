"""Carries out a shard's events: they pass the schedule and the state machine, whose instructions are obeyed.

    push, fetch, quorum, who takes part ─▶ EventSchedule ─▶ ShardState ─▶ Apply        to Updates
                                                                       ─▶ Acknowledge  to the PendingPush
                                                                       ─▶ Release      to the PendingFetch

An update that is due and a fetch that is released are events too, so the schedule decides when they happen.
Nothing in here reads from a stream or sends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable

from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import FetchTerms
from gradstream.server.quorum import QuorumDecision
from gradstream.server.shard.chunk_leases import ChunkLeases
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
from gradstream.server.shard.pending_fetch import PendingFetch
from gradstream.server.shard.pending_push import PendingPush
from gradstream.server.shard.state import (
    Acknowledge,
    Apply,
    Instruction,
    Release,
    Sender,
    ShardState,
    Supersede,
    Token,
)
from gradstream.server.shard.store import ShardStore
from gradstream.server.shard.stragglers import StragglerTracker
from gradstream.server.shard.updates import Updates

__all__ = ["ShardExecutor"]


class ShardExecutor:
    """Handles the events of a shard.

    Args:
        runtime: runtime of the shard's node.
        schedule: says when each event happens.
        state: the state machine.
        store: memory of the chunks.
        updates: arithmetic on that memory.
        leases: updates of a chunk wait for its readers.
        counters: counts the chunks that were pushed, by outcome.

    Attributes:
        stragglers: which workers made others wait.
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
        leases: ChunkLeases,
        counters: Counter[str],
    ) -> None:
        self._runtime = runtime
        self._schedule = schedule
        self._state = state
        self._store = store
        self._updates = updates
        self._leases = leases
        self._counters = counters
        self._members: frozenset[Sender] = frozenset()
        self._lingers = False  # a sender is gone whose pushes are not all applied
        self.stragglers = StragglerTracker()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        schedule.begin(state)

    # ---- events -------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Gives an event to the schedule, and carries out whatever happens now."""
        for admitted in self._schedule.admit(event):
            self._obey(self._transition(admitted))

    def _transition(self, event: Event) -> Iterable[Instruction]:
        state = self._state
        match event:
            case PushArrived(chunk, parked):
                self.stragglers.came(parked.token, chunk, self._runtime.now())
                return state.push(chunk, parked)
            case UpdateDue():
                return self._begin(event)
            case ChunkReleased(chunk, fetch):
                fetch.release(chunk, self.stragglers.waited(chunk, fetch.reader, fetch.opened_ns))
            case ChunkRead(chunk):
                event.clock = state.clocks.slowest(chunk)
            case FetchArrived(chunk, fetch, terms):
                return () if fetch.over else state.fetch(chunk, terms, fetch)
            case SumFlush(chunk):
                return state.fetch(chunk, self._flushing, self._own_fetch([chunk]))
            case ParticipationChange():
                self._participate(event)
                return state.clocks_changed()
            case QuorumDecision():
                return state.decide(event)
        return ()

    def _participate(self, change: ParticipationChange) -> None:
        clocks = self._state.clocks
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
                case Apply(chunk, update):
                    if update:
                        self.stragglers.completed(instruction)
                    parts = [_push(one.token).parts[chunk] for one in update if not one.header.empty]
                    self.handle(UpdateDue(instruction, parts, self._store.parameters_of(chunk)))
                case Acknowledge():
                    self._acknowledge(instruction)
                case Release(token, chunk):
                    assert isinstance(token, PendingFetch)
                    self.handle(ChunkReleased(chunk, token))
                case Supersede(token, chunk):
                    self.stragglers.gone(token, chunk)
                    _push(token).supersede(chunk)

    def _acknowledge(self, done: Acknowledge) -> None:
        self._counters[done.outcome] += 1
        self.stragglers.gone(done.token, done.chunk)
        push = _push(done.token)
        applied = done.outcome == "applied"
        waited = self.stragglers.waited(done.chunk, push.sender, push.opened_ns) if applied else None
        push.acknowledge(done, waited)

    # ---- updates ------------------------------------------------------------------------

    def _begin(self, update: UpdateDue) -> Iterable[Instruction]:
        due = update.due
        if self._updates.changes_nothing(due) and not self._leases.turn(due.chunk).locked():
            return self._applied(update)
        self._runtime.spawn(self._apply(update), name=f"apply-{due.chunk}")
        return ()

    async def _apply(self, update: UpdateDue) -> None:
        due = update.due
        async with self._leases.turn(due.chunk):
            if due.completes:
                await self._leases.gone(due.chunk)
            try:
                await self._updates.compute(due, update.parts)
            except Exception as error:
                if not self.failure.done():
                    self.failure.set_exception(error)
                return
            instructions = self._applied(update)
        following = [one for one in instructions if isinstance(one, Apply)]
        self._obey(one for one in instructions if not isinstance(one, Apply))
        if following:
            await self._runtime.sleep(0)  # a fetch that was just released reads before the next update
            self._obey(following)

    def _applied(self, update: UpdateDue) -> list[Instruction]:
        instructions = self._state.applied(update.due.chunk)
        if self._lingers:
            self._free_states()
        self.handle(UpdateApplied(update))
        return instructions

    def commanded(self, chunk: int) -> None:
        """Takes note that a command has changed a chunk's parameters."""
        self._obey(self._state.commanded(chunk))

    # ---- fetches ------------------------------------------------------------------------

    def forget(self, fetch: PendingFetch) -> None:
        """Ends a fetch: nothing is released to it any more."""
        fetch.over = True
        self._state.forget(fetch)

    async def flush(self) -> None:
        """Applies all sums; returns once everything that was acknowledged is in the parameters."""
        chunks = [chunk for chunk, state in self._state.chunks.items() if state.unapplied]
        fetch = self._own_fetch(chunks)
        try:
            for chunk in chunks:
                self.handle(FetchArrived(chunk, fetch, self._flushing))
            await fetch.emptied()
        finally:
            self.forget(fetch)

    def _own_fetch(self, chunks: Iterable[int]) -> PendingFetch:
        return PendingFetch(self._runtime.node, 0, 0, True, self._runtime.now(), set(chunks))

    @property
    def _flushing(self) -> FetchTerms:
        return FetchTerms(self._runtime.node, 0, flush=True)

    # ---- members ------------------------------------------------------------------------

    def keep_workers(self, ranks: Collection[int]) -> None:
        """Ceases to wait for the clocks of all other workers: they have left the run."""
        if self._state.clocks.present - set(ranks):
            self.handle(ParticipationChange("keep", tuple(sorted(ranks))))

    def keep_senders(self, members: Collection[Sender]) -> None:
        """Frees what the shard keeps of all other senders, once their pushes are applied."""
        self._members = frozenset(members)
        self._state.keep_senders(self._members)
        self._free_states()

    def _free_states(self) -> None:
        lingering = self._state.lingering
        self._lingers = bool(lingering)
        self._updates.keep_senders({name for name, _ in self._members} | lingering)


def _push(token: Token) -> PendingPush:
    """The push that a token stands for."""
    assert isinstance(token, PendingPush)
    return token
