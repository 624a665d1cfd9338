"""The event schedule of a shard in a replay: it keeps the recorded order of each chunk.

    a push, or a flush of a sum   happens at its recorded chunk time, after all that came to the chunk before it
    the release of a fetch        happens after as many updates as in the run
    an update                     begins when every event has happened that came before its end in the run

An event that was not recorded never happens: a worker that was killed in the run waits forever in the replay, at the
point where it was killed. A chunk waits for another one only through the workers, as in the run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeAlias

from gradstream.errors import DivergedError
from gradstream.ext.replay.update import UpdateAssembler
from gradstream.recording import Changed, Decided, Entry, FetchAsked, LogPart, Pushed, Read, Summed
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
    crc_of,
)
from gradstream.server.shard.state import QuorumDecision, ShardState

# ---- chunk log ---------------------------------------------------------------------------
# A shard's recording sorted by chunk: its events in order, the reads of fetches, and the checksums.


@dataclass(frozen=True, slots=True, eq=False)
class ShardEvent:
    """An event of several chunks at once, and the chunk time of each of them at which it happened."""

    event: QuorumDecision | ParticipationChange
    chunk_times: Mapping[int, int]


RecordedEvent: TypeAlias = Pushed | FetchAsked | ShardEvent
"""A recorded event whose place in the order of a chunk is kept."""


def chunk_time_of(event: RecordedEvent, chunk: int) -> int:
    """The chunk time at which an event of this chunk happened."""
    return event.chunk_times[chunk] if isinstance(event, ShardEvent) else event.chunk_time


@dataclass(slots=True)
class ChunkLog:
    """The recorded events of a chunk that have not happened yet, and the events that wait for their turn.

    Args:
        done: number of updates so far.
        ordered: recorded events that have not happened yet, in order.
        reads: by (rank, number) of a fetch, the number of updates done when it read the chunk.
        clocks: by (rank, number) of a fetch, the clock that its answer carried.
        unread: by number of updates done, the fetches that still have to read the chunk at this point.
        sums: by number of updates done, the CRC-32 of the parameters.
        early: events that arrived before their turn, by kind, rank and number.
        releases: by number of updates done, releases of fetches that wait for it.
        due: the update that begins as soon as no recorded event has to happen before it.
        admitting: whether `ReplaySchedule` is going through `ordered`.
    """

    done: int = 0
    ordered: deque[RecordedEvent] = field(default_factory=deque)
    reads: dict[tuple[int, int], int] = field(default_factory=dict)
    clocks: dict[tuple[int, int], int] = field(default_factory=dict)
    unread: defaultdict[int, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    sums: dict[int, int] = field(default_factory=dict)
    early: dict[Hashable, Event] = field(default_factory=dict)
    releases: defaultdict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    due: UpdateDue | None = None
    admitting: bool = False


def chunk_logs_of(part: LogPart) -> tuple[defaultdict[int, ChunkLog], defaultdict[int, deque[int]]]:
    """Sorts a shard's recording: by chunk its log, and by worker the clocks that it got each time it came back."""
    logs: defaultdict[int, ChunkLog] = defaultdict(ChunkLog)
    clocks: defaultdict[int, deque[int]] = defaultdict(deque)
    asked: set[tuple[int, int, int]] = set()

    def add_to_all(event: QuorumDecision | ParticipationChange, entry: Decided | Changed) -> None:
        shard_event = ShardEvent(event, dict(entry.chunk_times))
        for chunk in shard_event.chunk_times:
            logs[chunk].ordered.append(shard_event)

    for entry in part.entries:
        match entry:
            case Pushed():
                logs[entry.chunk].ordered.append(entry)
            case FetchAsked(chunk, rank, number):
                if number == 0 or (chunk, rank, number) not in asked:  # a second attempt changes nothing
                    asked.add((chunk, rank, number))
                    logs[chunk].ordered.append(entry)
            case Decided():
                add_to_all(QuorumDecision(entry.round, entry.ranks), entry)
            case Changed(kind, ranks, clock):
                add_to_all(ParticipationChange(kind, ranks, clock), entry)
                if kind == "enter":
                    clocks[ranks[0]].append(entry.new_clock)
            case Summed():
                logs[entry.chunk].sums[entry.done] = entry.crc
    _sort_reads(logs, part.entries)
    return logs, clocks


def _sort_reads(logs: defaultdict[int, ChunkLog], entries: Iterable[Entry]) -> None:
    attempts: dict[tuple[int, int, int], int] = {}
    for entry in entries:
        if isinstance(entry, Read):
            key = (entry.rank, entry.number)
            if entry.attempt > attempts.get((entry.chunk, *key), -1):  # nobody uses copies of an attempt
                attempts[entry.chunk, *key] = entry.attempt
                logs[entry.chunk].reads[key] = entry.chunk_time // 2
                logs[entry.chunk].clocks[key] = entry.clock
    for log in logs.values():
        for key, done in log.reads.items():
            log.unread[done].add(key)


# ---- schedule ----------------------------------------------------------------------------


class ReplaySchedule:
    """Implements `EventSchedule`: gives back each event when the recording says that it happened.

    Args:
        part: recording of the shard.
        assembler: observes the updates of the shard.
        on_event: called after each recorded event.
        on_divergence: called with the error when the replay differs from the recording.
    """

    def __init__(
        self,
        part: LogPart,
        assembler: UpdateAssembler,
        on_event: Callable[[], None],
        on_divergence: Callable[[DivergedError], None],
    ) -> None:
        self.node = part.node
        self._assembler = assembler
        self._on_event = on_event
        self._on_divergence = on_divergence
        self._state: ShardState | None = None  # until the model is registered
        self._logs, self._clocks = chunk_logs_of(part)

    @property
    def num_left(self) -> int:
        """Number of recorded contributions that have not arrived yet."""
        return sum(len(log.ordered) for log in self._logs.values())

    @property
    def over(self) -> bool:
        """Whether every recorded event has happened, except reads after the last update."""
        return not any(log.ordered or log.due or self._busy(chunk) for chunk, log in self._logs.items())

    def awaited(self) -> Iterable[str]:
        """The event that each chunk waits for, in words."""
        for chunk, log in self._logs.items():
            unread = log.unread[log.done] if log.due else set()
            head = log.ordered[0] if log.ordered else None
            if head is not None and not isinstance(head, ShardEvent) and not unread:
                event = f"push {head.sequence}" if isinstance(head, Pushed) else f"fetch {head.number}"
                yield f"{self.node}, chunk {chunk}: {event} of worker-{head.rank}"
            for rank, number in sorted(unread):
                yield f"{self.node}, chunk {chunk}: fetch {number} of worker-{rank}"

    def begin(self, state: ShardState) -> None:
        """See `EventSchedule`."""
        self._state = state

    def admit(self, event: Event) -> Iterable[Event]:
        """See `EventSchedule`."""
        match event:
            case PushArrived(chunk, parked):
                return self._await_turn(chunk, (Pushed, parked.header.rank, parked.header.sequence), event)
            case FetchArrived():
                return self._fetch(event)
            case ChunkReleased():
                return self._release(event)
            case ChunkRead():
                return self._read(event)
            case ParticipationChange():  # the recording has the time of the change, and the worker's new clock
                clocks = self._clocks[event.ranks[0]] if event.kind == "enter" else None
                event.new_clock = clocks.popleft() if clocks else event.clock
            case UpdateDue(due):
                self._logs[due.chunk].due = event
                return self._admit_due(due.chunk)
            case UpdateApplied(update):
                return self._applied(update)
        return ()  # a quorum decision happens at its recorded time, too

    def _busy(self, chunk: int) -> bool:
        return self._state is not None and self._state.chunks[chunk].busy

    def _chunk_time(self, chunk: int) -> int:
        return 2 * self._logs[chunk].done + self._busy(chunk)

    def _diverge(self, chunk: int, text: str) -> NoReturn:
        done = self._logs[chunk].done
        error = DivergedError(f"{self.node}, chunk {chunk}, after {done} updates: {text}")
        self._on_divergence(error)
        raise error

    # ---- pushes and flushes -------------------------------------------------------------

    def _fetch(self, event: FetchArrived) -> Iterable[Event]:
        """Drops the conditions of a fetch, since the recording says when it is released."""
        fetch, terms = event.fetch, event.terms
        none = FetchTerms(terms.sender, terms.incarnation, flush=terms.flush)
        event = replace(event, terms=none)
        if fetch.flushes and fetch.number:
            return self._await_turn(event.chunk, (FetchAsked, fetch.rank, fetch.number), event)
        return (event,)

    def _await_turn(self, chunk: int, key: Hashable, event: Event) -> Iterable[Event]:
        self._logs[chunk].early[key] = event
        return self._admit_due(chunk)

    def _admit_due(self, chunk: int) -> Iterable[Event]:
        """Yields the events that have arrived and are next; each may begin an update, which admits further ones."""
        log = self._logs[chunk]
        if log.admitting:
            return
        log.admitting = True
        while log.ordered and chunk_time_of(log.ordered[0], chunk) <= self._chunk_time(chunk):
            head = log.ordered[0]
            if chunk_time_of(head, chunk) < self._chunk_time(chunk):
                self._diverge(chunk, f"update {log.done} should have waited for {head}")
            if isinstance(head, ShardEvent):
                if not self._is_due(head):
                    break
                yield from self._happen(head)
                continue
            number = head.sequence if isinstance(head, Pushed) else head.number
            if isinstance(head, FetchAsked) and not number:
                yield SumFlush(chunk)
                log.ordered.popleft()
                continue
            event = log.early.pop((type(head), head.rank, number), None)
            if event is None:
                break
            if isinstance(event, PushArrived):
                assert isinstance(head, Pushed)
                self._compare(event, head)
            yield event
            log.ordered.popleft()
            self._on_event()
        log.admitting = False
        yield from self._begin_update(chunk)

    def _compare(self, event: PushArrived, entry: Pushed) -> None:
        """Diverges if a push differs from the recorded one."""
        new, assign = event.parked.header, event.parked.assign
        base_version = entry.base_version if new.empty else new.base_version  # an empty push has none
        if (base_version, new.empty, assign) != (entry.base_version, entry.absent, entry.assign):
            self._diverge(
                event.chunk,
                f"push {new.sequence} of worker-{new.rank} was computed on version {new.base_version}, "
                f"recorded {entry.base_version}",
            )

    def _is_due(self, event: ShardEvent) -> bool:
        """Whether an event of several chunks is next on each of them."""
        for chunk, chunk_time in event.chunk_times.items():
            ordered = self._logs[chunk].ordered
            if not ordered or ordered[0] is not event or self._chunk_time(chunk) != chunk_time:
                return False
        return True

    def _happen(self, event: ShardEvent) -> Iterable[Event]:
        for chunk in event.chunk_times:
            self._logs[chunk].ordered.popleft()
        yield event.event
        self._on_event()
        for chunk in event.chunk_times:
            yield from self._admit_due(chunk)

    # ---- reads --------------------------------------------------------------------------

    def _release(self, event: ChunkReleased) -> Iterable[Event]:
        chunk, fetch = event.chunk, event.fetch
        log = self._logs[chunk]
        done = log.reads.get((fetch.rank, fetch.number))
        if not fetch.number or done == log.done:
            return (event,)
        if done is not None and done > log.done:
            log.releases[done].append(event)
        elif done is not None:
            self._diverge(chunk, f"fetch {fetch.number} of worker-{fetch.rank} came after update {done}")
        return ()

    def _read(self, event: ChunkRead) -> Iterable[Event]:
        log, key = self._logs[event.chunk], (event.fetch.rank, event.fetch.number)
        yield event
        event.clock = log.clocks.get(key, event.clock)
        log.unread[log.done].discard(key)
        self._on_event()
        yield from self._begin_update(event.chunk)

    # ---- updates ------------------------------------------------------------------------

    def _begin_update(self, chunk: int) -> Iterable[Event]:
        """Yields the update that is due, if no recorded event has to happen before it is done."""
        log = self._logs[chunk]
        must_wait = bool(log.ordered) and chunk_time_of(log.ordered[0], chunk) // 2 <= log.done
        if log.due is None or must_wait or log.unread[log.done]:
            return
        update, log.due = log.due, None
        self._assembler.begin(update)
        yield update

    def _applied(self, update: UpdateDue) -> Iterable[Event]:
        chunk = update.due.chunk
        log = self._logs[chunk]
        log.done += 1
        crc = log.sums.get(log.done)
        if crc is not None and crc != crc_of(update.parameters):
            self._diverge(chunk, "the parameters are not those of the recorded run")
        self._assembler.applied(update)
        self._on_event()
        yield from log.releases.pop(log.done, ())
        yield from self._admit_due(chunk)
