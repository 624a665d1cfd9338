"""The events of a shard, and the `EventSchedule` that says when each of them happens.

A shard is a pure state machine for each chunk, so the order of its events is its history. The `ShardExecutor` gives
every event to its schedule and handles those that it gets back: in a run the event itself, at once; in a replay
the events whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch

from gradstream.server.aggregation import FetchTerms
from gradstream.server.quorum import QuorumDecision
from gradstream.server.shard.pending_fetch import PendingFetch
from gradstream.server.shard.row_store import Part
from gradstream.server.shard.state import Apply, Parked, ShardState

__all__ = [
    "ArrivalOrder",
    "ChunkRead",
    "ChunkReleased",
    "Event",
    "EventSchedule",
    "FetchArrived",
    "ParticipationChange",
    "PushArrived",
    "SumFlush",
    "UpdateApplied",
    "UpdateDue",
]


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
    """A fetch may have a chunk: its terms hold."""

    chunk: int
    fetch: PendingFetch


@dataclass(slots=True)
class ChunkRead:
    """A fetch gets a chunk as it is now.

    Args:
        chunk: number of the chunk.
        fetch: the fetch.
        clock: clock that the reader is told; whoever handles the event fills it in.
    """

    chunk: int
    fetch: PendingFetch
    clock: int = 0


@dataclass(frozen=True, slots=True)
class SumFlush:
    """The shard applies what a chunk's sum holds, on its own behalf."""

    chunk: int


@dataclass(slots=True)
class ParticipationChange:
    """Workers begin or cease to take part, on all chunks at once.

    Args:
        kind: "leave": the worker has nothing to do for now; "enter": it takes part from `clock` on; "keep": no
            workers but these are left.
        ranks: ranks of the workers.
        clock: own clock of a worker that enters.
        new_clock: clock that it has from now on; the executor, or a replay, fills it in.
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
        parts: what each of its pushes holds; empty pushes are left out.
        parameters: of the chunk, in the store's own memory: the update changes them.
    """

    due: Apply
    parts: Sequence[Part]
    parameters: torch.Tensor


@dataclass(frozen=True, slots=True)
class UpdateApplied:
    """The arithmetic of an update is done, and the state machine knows."""

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
    """Says when a shard's events happen. Its methods are called on the event loop, and never block."""

    def begin(self, state: ShardState) -> None:
        """Called once, when the model is registered."""
        ...

    def admit(self, event: Event) -> Iterable[Event]:
        """The events that happen now that this one has come, in order; the event itself may be held back.

        The shard handles each event before it takes the next one.
        """
        ...


class ArrivalOrder:
    """Every event happens as it comes."""

    def begin(self, state: ShardState) -> None:
        """See `EventSchedule`."""

    def admit(self, event: Event) -> Iterable[Event]:
        """The event itself."""
        return (event,)
