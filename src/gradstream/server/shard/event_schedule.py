"""The events of a shard, and the `EventSchedule` that decides when each of them happens.

A shard is a pure state machine for each chunk, so the order of its events determines its history. The
`ShardExecutor` passes every event to its schedule, and handles the events that it gets back: in a run the event
itself, at once; in a replay the events that come next in the recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch

from gradstream.server.aggregation import FetchTerms
from gradstream.server.quorum import QuorumDecision
from gradstream.server.shard.instructions import Apply, Parked
from gradstream.server.shard.pending_fetch import PendingFetch
from gradstream.server.shard.row_store import Part
from gradstream.server.shard.state import ShardState


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
