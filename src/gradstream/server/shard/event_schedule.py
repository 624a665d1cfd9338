"""The events of a shard, and the `EventSchedule` that decides when each of them happens.

A shard is a pure state machine for each chunk, so the order of its events determines its history. The
`ShardExecutor` passes every event to its schedule, and handles the events that it gets back: in a run the event
itself, at once; in a replay the events that come next in the recording.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch

from gradstream.recording import Changed, Closed, Decided, FetchAsked, Log, Pushed, Read, Summed
from gradstream.server.aggregation import FetchTerms
from gradstream.server.rows import Part
from gradstream.server.shard.pushes import PendingFetch
from gradstream.server.shard.state import Apply, Parked, QuorumDecision, ShardState
from gradstream.wire.frames import SequenceWindow

# ---- event schedule ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PushArrived:
    """One chunk of a push has arrived."""

    chunk: int
    parked: Parked


@dataclass(frozen=True, slots=True)
class FetchArrived:
    """A fetch asks for a chunk, and waits until these terms hold."""

    chunk: int
    fetch: PendingFetch
    terms: FetchTerms


@dataclass(frozen=True, slots=True)
class ChunkReleased:
    """A chunk has reached the version and clocks that a fetch asks for, so the fetch may read it."""

    chunk: int
    fetch: PendingFetch


@dataclass(slots=True)
class ChunkRead:
    """A fetch reads a chunk.

    Args:
        chunk: number of the chunk.
        fetch: the fetch.
        clock: clock of the chunk, for the reader; the handler of the event sets it.
    """

    chunk: int
    fetch: PendingFetch
    clock: int = 0


@dataclass(frozen=True, slots=True)
class SumFlush:
    """The shard applies a chunk's sum, without a fetch of a worker."""

    chunk: int


@dataclass(slots=True)
class ParticipationChange:
    """Workers begin or stop to take part, on all chunks at once.

    Args:
        kind: "leave": the worker has nothing to do for now; "enter": it takes part from `clock` on; "keep": all
            other workers are lost.
        ranks: ranks of the workers.
        clock: own clock of a worker that enters.
        new_clock: the worker's clock from now on; the executor, or a replay, sets it.
    """

    kind: Literal["leave", "enter", "keep"]
    ranks: tuple[int, ...]
    clock: int = 0
    new_clock: int = 0


@dataclass(frozen=True, slots=True)
class UpdateDue:
    """The arithmetic of an update can begin.

    Args:
        due: the update, as the state machine asked for it.
        parts: content of each of its pushes, without the empty ones.
        parameters: parameters of the chunk, in the store's own memory, which the update changes.
    """

    due: Apply
    parts: Sequence[Part]
    parameters: torch.Tensor


@dataclass(frozen=True, slots=True)
class UpdateApplied:
    """The arithmetic of an update is done, and the state machine has been told."""

    update: UpdateDue


Event: TypeAlias = (
    PushArrived
    | FetchArrived
    | ChunkReleased
    | ChunkRead
    | SumFlush
    | ParticipationChange
    | QuorumDecision
    | UpdateDue
    | UpdateApplied
)


class EventSchedule(Protocol):
    """Decides when a shard's events happen. The executor calls its methods on the event loop; they never block."""

    def begin(self, state: ShardState) -> None:
        """Takes the state machine. Called once, when the model is registered."""
        ...

    def admit(self, event: Event) -> Iterable[Event]:
        """The events that happen now, in order. The new event is among them, or is delayed.

        The shard handles each event before it takes the next one.
        """
        ...


class ArrivalOrder:
    """Lets every event happen as it comes."""

    def begin(self, state: ShardState) -> None:
        """See `EventSchedule`."""

    def admit(self, event: Event) -> Iterable[Event]:
        """The event itself."""
        return (event,)


# ---- recorder ----------------------------------------------------------------------------
# Records the order of a shard's events, so that a replay can repeat it.

SUM_EVERY = 64
"""Updates of a chunk from one CRC-32 of its parameters to the next."""


class ShardRecorder:
    """An `EventSchedule` that lets every event happen as it comes, and records it.

    A second copy of a push changes nothing, so the recorder records only the first copy.

    Args:
        log: takes the entries.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self._done: defaultdict[int, int] = defaultdict(int)  # number of updates, by chunk
        self._came: defaultdict[tuple[int, int], SequenceWindow] = defaultdict(SequenceWindow)
        self._state: ShardState | None = None  # until the model is registered

    def begin(self, state: ShardState) -> None:
        """See `EventSchedule`."""
        self._state = state

    def admit(self, event: Event) -> Iterable[Event]:
        """See `EventSchedule`."""
        match event:
            case PushArrived():
                self._record_push(event)
            case FetchArrived(chunk, fetch) if fetch.flushes:
                self.log.add(FetchAsked(chunk, fetch.rank, fetch.number, self._chunk_time(chunk)))
            case ChunkRead(chunk, fetch) if fetch.number:
                yield event
                chunk_time = self._chunk_time(chunk)
                self.log.add(Read(chunk, fetch.rank, fetch.number, fetch.attempt, chunk_time, event.clock))
                return
            case ParticipationChange():
                chunk_times = self._chunk_times()
                yield event
                self.log.add(Changed(event.kind, event.ranks, event.clock, event.new_clock, chunk_times))
                return
            case QuorumDecision(round_, ranks):
                self.log.add(Decided(round_, ranks, self._chunk_times()))
            case UpdateApplied(update):
                chunk = update.due.chunk
                self._done[chunk] += 1
                if self._done[chunk] % SUM_EVERY == 1:  # the first one brings initial parameters
                    self._sum(chunk, update.parameters)
        yield event

    def _record_push(self, event: PushArrived) -> None:
        chunk, new, assign = event.chunk, event.parked.header, event.parked.assign
        if self._came[chunk, new.rank].add(new.sequence):
            assert self._state is not None
            chunk_time, version = self._chunk_time(chunk), self._state.version(chunk)
            self.log.add(
                Pushed(
                    chunk, new.rank, new.sequence, chunk_time, new.base_version, version, assign, new.empty
                )
            )

    def close(self, parameters: Callable[[int], torch.Tensor]) -> None:
        """Records that the run is over, and a CRC of every chunk as it is now.

        Args:
            parameters: gives the parameters of a chunk.
        """
        for chunk in sorted(self._done):
            if not self._chunk_time(chunk) & 1:
                self._sum(chunk, parameters(chunk))
        self.log.add(Closed())
        self.log.flush()

    def _sum(self, chunk: int, parameters: torch.Tensor) -> None:
        if not parameters.is_meta:
            self.log.add(Summed(chunk, self._done[chunk], crc_of(parameters)))

    def _chunk_times(self) -> tuple[tuple[int, int], ...]:
        assert self._state is not None
        return tuple((chunk, self._chunk_time(chunk)) for chunk in self._state.chunks)

    def _chunk_time(self, chunk: int) -> int:
        assert self._state is not None
        return 2 * self._done[chunk] + self._state.chunks[chunk].busy


def crc_of(elements: torch.Tensor) -> int:
    """CRC-32 of a contiguous vector's bytes."""
    return zlib.crc32(elements.numpy().data.cast("B"))
