"""Holds a shard to the order that was recorded, chunk by chunk.

    what comes   a contribution is let in at its moment, behind all those that came to the chunk before it
    what goes    a fetch is given a chunk when so many updates are done as when it was given it before
    an update    waits until everything has come and gone that had, when it was done

What was never recorded never happens: a worker that was killed waits in its replay for ever, at the point
at which it was killed. Chunks do not wait for one another, but through workers: as they did.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from gradstream.errors import DivergedError
from gradstream.recording import FetchAsked, LogPart, Pushed
from gradstream.replay.chunk_log import Coming, ShardLog, course_of, moment_of
from gradstream.server.aggregation import FetchTerms
from gradstream.server.shard.event_schedule import (
    ChunkRead,
    ChunkReleased,
    Event,
    FetchArrived,
    ParticipationChange,
    PushArrived,
    SumFlush,
    UpdateApplied,
    UpdateDue,
)
from gradstream.server.shard.recorder import crc_of
from gradstream.server.shard.state import ShardState

__all__ = ["ReplayListener", "ReplaySchedule"]


class ReplayListener:
    """Told of what happens in a replay. Does nothing."""

    def moved(self) -> None:
        """Something that was recorded has happened."""

    def updates(self, updating: UpdateDue) -> None:
        """An update begins."""

    def updated(self, updating: UpdateDue) -> None:
        """It is done."""

    def diverged(self, error: DivergedError) -> None:
        """This is another run."""


class ReplaySchedule:
    """Implements `EventSchedule`.

    Args:
        part: what the shard has recorded.
        told: of what happens.
    """

    def __init__(self, part: LogPart, told: ReplayListener) -> None:
        self.node = part.node
        self._told = told
        self._state: ShardState | None = None  # until the model is registered
        self._chunks, self._entered = course_of(part)

    @property
    def num_left(self) -> int:
        """Contributions that have not come yet."""
        return sum(len(state.ordered) for state in self._chunks.values())

    @property
    def over(self) -> bool:
        """Whether everything that was recorded has happened, but for fetches that no update follows."""
        return not any(
            state.ordered or state.next or self._busy(chunk) for chunk, state in self._chunks.items()
        )

    def _busy(self, chunk: int) -> bool:
        return self._state is not None and self._state.chunks[chunk].busy

    def awaited(self) -> Iterable[str]:
        """What each chunk waits for, in words."""
        for chunk, state in self._chunks.items():
            unread = state.unread[state.done] if state.next else set()
            head = state.ordered[0] if state.ordered else None
            if head is not None and not isinstance(head, ShardLog) and not unread:
                what = f"push {head.sequence}" if isinstance(head, Pushed) else f"fetch {head.number}"
                yield f"{self.node}, chunk {chunk}: {what} of worker-{head.rank}"
            for rank, number in sorted(unread):
                yield f"{self.node}, chunk {chunk}: fetch {number} of worker-{rank}"

    def begin(self, state: ShardState) -> None:
        """See `EventSchedule`."""
        self._state = state

    def admit(self, event: Event) -> Iterable[Event]:
        """See `EventSchedule`."""
        match event:
            case PushArrived(chunk, parked):
                return self._hold(chunk, (Pushed, parked.header.rank, parked.header.sequence), event)
            case FetchArrived():
                return self._fetch(event)
            case ChunkReleased():
                return self._release(event)
            case ChunkRead():
                return self._read(event)
            case ParticipationChange():  # when it happened is recorded, and so is the clock that the worker was told
                answers = self._entered[event.ranks[0]] if event.kind == "enter" else None
                event.told = answers.popleft() if answers else event.clock
            case UpdateDue(due):
                self._chunks[due.chunk].next = event
                return self._let_in(due.chunk)
            case UpdateApplied(update):
                return self._applied(update)
        return ()  # quorum decisions, too, are taken from the recording

    # ---- what comes ---------------------------------------------------------------------

    def _fetch(self, event: FetchArrived) -> Iterable[Event]:
        """A fetch waits for its turn alone."""
        fetch, terms = event.fetch, event.terms
        none = FetchTerms(terms.sender, terms.incarnation, flush=terms.flush, beside=terms.beside)
        event = replace(event, terms=none)
        if fetch.flushes and fetch.number:
            return self._hold(event.chunk, (FetchAsked, fetch.rank, fetch.number), event)
        return (event,)

    def _hold(self, chunk: int, key: Hashable, event: Event) -> Iterable[Event]:
        self._chunks[chunk].held[key] = event
        return self._let_in(chunk)

    def _let_in(self, chunk: int) -> Iterable[Event]:
        """Lets in what has come and has its turn; each may begin an update, and so bring about the next."""
        state = self._chunks[chunk]
        if state.letting_in:
            return
        state.letting_in = True
        while state.ordered and moment_of(state.ordered[0], chunk) <= self._moment(chunk):
            head = state.ordered[0]
            if moment_of(head, chunk) < self._moment(chunk):
                self._diverge(chunk, f"update {state.done} should have waited for {head}")
            if isinstance(head, ShardLog):
                if not self._is_due(head):
                    break
                yield from self._happen(head)
                continue
            number = head.sequence if isinstance(head, Pushed) else head.number
            if isinstance(head, FetchAsked) and not number:
                yield SumFlush(chunk)
                state.ordered.popleft()
                continue
            event = state.held.pop((type(head), head.rank, number), None)
            if event is None:
                break
            if isinstance(event, PushArrived):
                self._compare(event, head)
            yield event
            state.ordered.popleft()
            self._told.moved()
        state.letting_in = False
        yield from self._go_on(chunk)

    def _compare(self, event: PushArrived, entry: Coming) -> None:
        """Diverges where a push is not the recorded one."""
        assert isinstance(entry, Pushed)
        new, assign = event.parked.header, event.parked.assign
        base_version = entry.base_version if new.empty else new.base_version  # an empty push has none
        if (base_version, new.empty, assign) != (entry.base_version, entry.absent, entry.assign):
            self._diverge(
                event.chunk,
                f"push {new.sequence} of worker-{new.rank} was computed on version {new.base_version}, "
                f"recorded {entry.base_version}",
            )

    def _is_due(self, event: ShardLog) -> bool:
        """Whether an event of all chunks has its turn on each."""
        for chunk, moment in event.moments.items():
            ordered = self._chunks[chunk].ordered
            if not ordered or ordered[0] is not event or self._moment(chunk) != moment:
                return False
        return True

    def _happen(self, event: ShardLog) -> Iterable[Event]:
        for chunk in event.moments:
            self._chunks[chunk].ordered.popleft()
        yield event.event
        self._told.moved()
        for chunk in event.moments:
            yield from self._let_in(chunk)

    def _moment(self, chunk: int) -> int:
        return 2 * self._chunks[chunk].done + self._busy(chunk)

    # ---- what goes ----------------------------------------------------------------------

    def _release(self, event: ChunkReleased) -> Iterable[Event]:
        chunk, fetch = event.chunk, event.fetch
        state = self._chunks[chunk]
        done = state.reads.get((fetch.rank, fetch.number))
        if not fetch.number or done == state.done:
            return (event,)
        if done is not None and done > state.done:
            state.releases[done].append(event)
        elif done is not None:
            self._diverge(chunk, f"fetch {fetch.number} of worker-{fetch.rank} came behind update {done}")
        return ()

    def _read(self, event: ChunkRead) -> Iterable[Event]:
        state, key = self._chunks[event.chunk], (event.fetch.rank, event.fetch.number)
        yield event
        event.clock = state.clocks.get(key, event.clock)
        state.unread[state.done].discard(key)
        self._told.moved()
        yield from self._go_on(event.chunk)

    # ---- updates ------------------------------------------------------------------------

    def _go_on(self, chunk: int) -> Iterable[Event]:
        """Lets the update begin that waits, if nothing has to happen before it is done."""
        state = self._chunks[chunk]
        before = bool(state.ordered) and moment_of(state.ordered[0], chunk) // 2 <= state.done
        if state.next is None or before or state.unread[state.done]:
            return
        update, state.next = state.next, None
        self._told.updates(update)
        yield update

    def _applied(self, update: UpdateDue) -> Iterable[Event]:
        chunk = update.due.chunk
        state = self._chunks[chunk]
        state.done += 1
        crc = state.sums.get(state.done)
        if crc is not None and crc != crc_of(update.parameters):
            self._diverge(chunk, "the parameters are not those of the recorded run")
        self._told.updated(update)
        self._told.moved()
        yield from state.releases.pop(state.done, ())
        yield from self._let_in(chunk)

    def _diverge(self, chunk: int, what: str) -> None:
        done = self._chunks[chunk].done
        self._told.diverged(DivergedError(f"{self.node}, chunk {chunk}, after {done} updates: {what}"))
