"""What a shard has recorded, chunk by chunk: what comes in which order, who reads when, and the sums."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from gradstream.recording import Changed, Decided, Entry, FetchAsked, LogPart, Pushed, Read, Summed
from gradstream.server.quorum import QuorumDecision
from gradstream.server.shard.event_schedule import Event, ParticipationChange, UpdateDue

__all__ = ["ChunkLog", "Coming", "ShardLog", "course_of", "moment_of"]


@dataclass(frozen=True, slots=True, eq=False)
class ShardLog:
    """What is for all chunks at once: at these moments."""

    event: QuorumDecision | ParticipationChange
    moments: Mapping[int, int]


Coming: TypeAlias = Pushed | FetchAsked | ShardLog
"""What is let in at a moment of a chunk."""


def moment_of(coming: Coming, chunk: int) -> int:
    """When that is."""
    return coming.moments[chunk] if isinstance(coming, ShardLog) else coming.moment


@dataclass(slots=True)
class ChunkLog:
    """What is left to happen to a chunk, and what waits for it.

    Args:
        done: updates so far.
        ordered: what has not come yet, in order.
        reads: by (rank, number) of a fetch, how many updates are done when it is given the chunk.
        clocks: likewise, the clock that it is told.
        unread: by updates done, the fetches that are to be given it then and have not been.
        sums: by updates done, the CRC-32 of the parameters.
        held: what has come before its moment, by kind, rank and number.
        releases: by updates done, fetches that wait for as many.
        next: the update that is due, and begins when nothing has to happen before.
        letting_in: `ordered` is being gone through.
    """

    done: int = 0
    ordered: deque[Coming] = field(default_factory=deque)
    reads: dict[tuple[int, int], int] = field(default_factory=dict)
    clocks: dict[tuple[int, int], int] = field(default_factory=dict)
    unread: defaultdict[int, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    sums: dict[int, int] = field(default_factory=dict)
    held: dict[Hashable, Event] = field(default_factory=dict)
    releases: defaultdict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    next: UpdateDue | None = None
    letting_in: bool = False


def course_of(part: LogPart) -> tuple[defaultdict[int, ChunkLog], defaultdict[int, deque[int]]]:
    """By chunk, what is to happen to it; and by worker, the clocks that it was told when it came back."""
    chunks: defaultdict[int, ChunkLog] = defaultdict(ChunkLog)
    entered: defaultdict[int, deque[int]] = defaultdict(deque)
    for entry in part.entries:
        if isinstance(entry, Changed) and entry.kind == "enter":
            entered[entry.ranks[0]].append(entry.told)
        elif isinstance(entry, Summed):
            chunks[entry.chunk].sums[entry.done] = entry.crc
    _order(chunks, part.entries)
    _read(chunks, part.entries)
    return chunks, entered


def _order(chunks: defaultdict[int, ChunkLog], entries: Iterable[Entry]) -> None:
    asked: set[tuple[int, int, int]] = set()
    for entry in entries:
        if isinstance(entry, Pushed):
            chunks[entry.chunk].ordered.append(entry)
        elif isinstance(entry, FetchAsked):
            key = (entry.chunk, entry.rank, entry.number)
            if entry.number == 0 or key not in asked:  # a second try does nothing more
                asked.add(key)
                chunks[entry.chunk].ordered.append(entry)
        elif isinstance(entry, Decided):
            _together(chunks, ShardLog(QuorumDecision(entry.round, entry.ranks), dict(entry.moments)))
        elif isinstance(entry, Changed):
            change = ParticipationChange(entry.kind, entry.ranks, entry.clock)
            _together(chunks, ShardLog(change, dict(entry.moments)))


def _together(chunks: defaultdict[int, ChunkLog], event: ShardLog) -> None:
    for chunk in event.moments:
        chunks[chunk].ordered.append(event)


def _read(chunks: defaultdict[int, ChunkLog], entries: Iterable[Entry]) -> None:
    attempts: dict[tuple[int, int, int], int] = {}
    for entry in entries:
        if isinstance(entry, Read):
            key = (entry.rank, entry.number)
            if entry.attempt > attempts.get((entry.chunk, *key), -1):  # a second copy of a try is nobody's
                attempts[entry.chunk, *key] = entry.attempt
                chunks[entry.chunk].reads[key] = entry.moment // 2
                chunks[entry.chunk].clocks[key] = entry.clock
    for course in chunks.values():
        for key, done in course.reads.items():
            course.unread[done].add(key)
