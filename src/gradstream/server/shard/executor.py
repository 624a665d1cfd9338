"""Between a shard's streams and its state machine: events go in, in order, and instructions are carried out.

    push, fetch, verdict, who takes part ─▶ Order ─▶ ShardState ─▶ Apply        to Updates, and then `applied`
                                                                ─▶ Acknowledge  to the Inbox of a push
                                                                ─▶ Release      to the Outbox of a fetch

Nothing in here reads from a stream or sends. What the order holds back happens when its time has come.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial

from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import FetchTerms, PushHeader
from gradstream.server.quorum import QuorumDecision
from gradstream.server.shard.chunk_leases import ChunkLeases
from gradstream.server.shard.event_schedule import Change, EventSchedule, Fetched, Updating
from gradstream.server.shard.pending_fetch import PendingFetch
from gradstream.server.shard.pending_push import PendingPush
from gradstream.server.shard.row_store import Part, elements_of
from gradstream.server.shard.state import (
    Acknowledge,
    Apply,
    Instruction,
    Parked,
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
    """Implements `order.Chunks`: what an `EventSchedule` may ask, or have done when its time has come.

    Args:
        runtime: of the shard's node.
        rank: of the shard.
        order: lets each event happen.
        state: the state machine.
        store: the chunks' memory.
        updates: the arithmetic on it.
        readers: who is at a chunk.
        counters: counts each outcome of a chunk that was pushed.

    Attributes:
        latecomers: for whom answers had to wait.
        failure: fails with the error of an update that could not be computed, which leaves the parameters
            undefined and must end the node.
    """

    def __init__(
        self,
        runtime: Runtime,
        rank: int,
        order: EventSchedule,
        state: ShardState,
        store: ShardStore,
        updates: Updates,
        readers: ChunkLeases,
        counters: Counter[str],
    ) -> None:
        self._runtime = runtime
        self._rank = rank
        self._order = order
        self._state = state
        self._store = store
        self._updates = updates
        self._readers = readers
        self._counters = counters
        self._members: frozenset[Sender] = frozenset()
        self._lingers = False  # something is kept of a sender that is gone
        self.latecomers = StragglerTracker()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        order.begin(self)

    # ---- pushes and fetches -------------------------------------------------------------

    def push(
        self, inbox: PendingPush, chunk: int, new: PushHeader, part: Part | None, *, assign: bool
    ) -> None:
        """A chunk of a push has come, None of what is absent; `inbox` is told what becomes of it."""
        inbox.took(chunk, part)
        self.latecomers.came(inbox, chunk, self._runtime.now())
        parked = Parked(new, inbox, assign)
        self._order.push(chunk, new, assign, partial(self._park, chunk, parked))

    def _park(self, chunk: int, parked: Parked) -> None:
        self._carry_out(self._state.push(chunk, parked))

    def ask(self, outbox: PendingFetch, chunk: int, terms: FetchTerms) -> None:
        """A fetch wants a chunk; `outbox` is told when it may have it."""
        self._order.ask(chunk, outbox.fetched, terms, partial(self._ask, outbox, chunk))

    def _ask(self, outbox: PendingFetch, chunk: int, terms: FetchTerms) -> None:
        if not outbox.over:
            self._carry_out(self._state.fetch(chunk, terms, outbox))

    def read(self, outbox: PendingFetch, chunk: int) -> int:
        """A fetch has a chunk, as it is now. Returns the clock that it is told."""
        return self._order.read(chunk, outbox.fetched, self._state.clocks.slowest(chunk))

    def forget(self, outbox: PendingFetch) -> None:
        """A fetch is over: nothing waits for it any more."""
        outbox.over = True
        self._state.forget(outbox)

    async def flush(self) -> None:
        """Returns once no chunk's sum holds anything that is not in the parameters."""
        chunks = [chunk for chunk, state in self._state.chunks.items() if state.unapplied]
        outbox = self._own_fetch(chunks)
        try:
            for chunk in chunks:
                self.ask(outbox, chunk, self._flushing)
            await outbox.emptied()
        finally:
            self.forget(outbox)

    def flush_sum(self, chunk: int) -> None:
        """Applies what a chunk's sum holds, without waiting for it: for an `EventSchedule` that knows when."""
        self._ask(self._own_fetch([chunk]), chunk, self._flushing)

    def _own_fetch(self, chunks: Iterable[int]) -> PendingFetch:
        fetched = Fetched(self._rank, 0, acts=True)
        return PendingFetch(self._runtime.node, fetched, self._runtime.now(), set(chunks))

    @property
    def _flushing(self) -> FetchTerms:
        return FetchTerms(self._runtime.node, 0, flush=True)

    # ---- who takes part -----------------------------------------------------------------

    def take_part(self, rank: int, clock: int | None) -> int:
        """A worker is at this clock, or, without one, has nothing to do for now. Returns its clock."""
        change = Change("leave" if clock is None else "enter", (rank,), clock or 0)
        return self._order.change(change, partial(self.change, change))

    def keep(self, ranks: Collection[int]) -> None:
        """Only these workers are left in the run: nobody waits for the others' clocks."""
        if self._state.clocks.present - set(ranks):
            change = Change("keep", tuple(sorted(ranks)))
            self._order.change(change, partial(self.change, change))

    def keep_senders(self, members: Collection[Sender]) -> None:
        """Only these are members: frees what is kept of others, once all that they have brought is used."""
        self._members = frozenset(members)
        self._state.keep_senders(self._members)
        self._free_states()

    def _free_states(self) -> None:
        lingering = self._state.lingering
        self._lingers = bool(lingering)
        self._updates.keep_senders({name for name, _ in self._members} | lingering)

    def commanded(self, chunk: int) -> None:
        """A command has changed a chunk's parameters."""
        self._carry_out(self._state.commanded(chunk))

    def change(self, change: Change) -> int:
        """Somebody takes part that did not, or no longer does. Returns the clock of who enters."""
        clocks, clock = self._state.clocks, 0
        match change.kind:
            case "enter":
                clock = clocks.resume(change.ranks[0], change.clock)
            case "leave":
                clocks.pause(change.ranks[0])
            case "keep":
                clocks.keep(change.ranks)
        self._carry_out(self._state.clocks_changed())
        return clock

    def judge(self, verdict: QuorumDecision) -> None:
        """A verdict has come."""
        self._order.decide(verdict, partial(self.decide, verdict))

    def decide(self, verdict: QuorumDecision) -> None:
        """It is known whose contributions make the update of a round."""
        self._carry_out(self._state.decide(verdict))

    # ---- chunks -------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """The chunks of this shard."""
        return list(self._state.chunks)

    def busy(self, chunk: int) -> bool:
        """Whether a chunk is being updated, or its sum is."""
        return self._state.chunks[chunk].busy

    def version(self, chunk: int) -> int:
        """How many updates a chunk has had; -1 before its initial parameters."""
        return self._state.version(chunk)

    # ---- instructions of the state machine ----------------------------------------------

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Apply():
                    if instruction.update:
                        self.latecomers.completed(instruction)
                    self._order.update(self._updating(instruction), partial(self._begin, instruction))
                case Acknowledge():
                    self._acknowledge(instruction)
                case Release(token, chunk):
                    assert isinstance(token, PendingFetch)
                    self._order.release(chunk, token.fetched, partial(self._release, token, chunk))
                case Supersede(token, chunk):
                    self.latecomers.gone(token, chunk)
                    _inbox(token).supersede(chunk)

    def _acknowledge(self, done: Acknowledge) -> None:
        self._counters[done.outcome] += 1
        self.latecomers.gone(done.token, done.chunk)
        inbox = _inbox(done.token)
        applied = done.outcome == "applied"
        waited = self.latecomers.waited(done.chunk, inbox.sender, inbox.opened_ns) if applied else None
        inbox.acknowledge(done, waited)

    def _release(self, outbox: PendingFetch, chunk: int) -> None:
        outbox.release(chunk, self.latecomers.waited(chunk, outbox.reader, outbox.opened_ns))

    # ---- updates ------------------------------------------------------------------------

    def _updating(self, due: Apply) -> Updating:
        parts = [elements_of(part) for part in self._parts(due)]
        return Updating(due, parts, self._store.parameters_of(due.chunk))

    def _parts(self, due: Apply) -> list[Part]:
        present = [held for held in due.update if not held.contribution.empty]
        return [_inbox(held.token).parts[due.chunk] for held in present]

    def _begin(self, due: Apply) -> None:
        if self._updates.changes_nothing(due) and not self._readers.turn(due.chunk).locked():
            self._carry_out(self._applied(due))
        else:
            self._runtime.spawn(self._apply(due), name=f"apply-{due.chunk}")

    async def _apply(self, due: Apply) -> None:
        async with self._readers.turn(due.chunk):
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
        instructions = self._state.applied(due.chunk)
        if self._lingers:
            self._free_states()
        self._order.updated(updating)
        return instructions


def _inbox(token: Token) -> PendingPush:
    """The push that a token stands for."""
    assert isinstance(token, PendingPush)
    return token
