"""A shard's recording sorted by chunk: its events in order, the reads of fetches, and the checksums."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from gradstream.recording import Changed, Decided, Entry, FetchAsked, LogPart, Pushed, Read, Summed
from gradstream.server.quorum import QuorumDecision
from gradstream.server.shard.event_schedule import Event, ParticipationChange, UpdateDue


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
            if entry.attempt > attempts.get((entry.chunk, *key), -1):  # nobody uses a copy of an attempt
                attempts[entry.chunk, *key] = entry.attempt
                logs[entry.chunk].reads[key] = entry.chunk_time // 2
                logs[entry.chunk].clocks[key] = entry.clock
    for log in logs.values():
        for key, done in log.reads.items():
            log.unread[done].add(key)
