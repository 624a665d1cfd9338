"""The order in which a shard takes what comes: a place to note it, and to hold what comes to another.

A shard is a pure state machine for each chunk, so the order of its events makes its history. Each event
passes an `EventSchedule`, which lets it happen by calling `go`: at once in a run, in a replay when it is its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from gradstream.server.aggregation import FetchTerms, PushHeader
from gradstream.server.quorum import QuorumDecision
from gradstream.server.shard.state import Apply

__all__ = ["ArrivalOrder", "Change", "Chunks", "EventSchedule", "Fetched", "Go", "Updating"]

Go = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A worker's fetch, as far as its order is concerned.

    Args:
        rank: of the worker.
        number: of its fetches, from 1; 0 for one beside them, or of the shard itself.
        attempt: tries before this one.
        acts: it changes the chunk's state by itself, not only by being answered.
    """

    rank: int
    number: int
    attempt: int = 0
    acts: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A change of who takes part, on all chunks at once.

    Args:
        kind: a worker has nothing to do for now; takes part from this clock on; only these are left.
        ranks: whose.
        clock: of who enters.
    """

    kind: Literal["leave", "enter", "keep"]
    ranks: tuple[int, ...]
    clock: int = 0


@dataclass(frozen=True, slots=True)
class Updating:
    """A chunk's update, before or behind its arithmetic.

    Args:
        due: as the state machine asked for it.
        parts: elements of its contributions, those that are absent left out.
        parameters: of the chunk, as they lie in the store: they change under who keeps them.
    """

    due: Apply
    parts: Sequence[torch.Tensor]
    parameters: torch.Tensor


class Chunks(Protocol):
    """The chunks of a shard, as an order may ask about them."""

    def numbers(self) -> Sequence[int]:
        """Which they are."""
        ...

    def busy(self, chunk: int) -> bool:
        """Whether it is being updated, or its sum is."""
        ...

    def version(self, chunk: int) -> int:
        """How many updates it has had; -1 before its initial parameters."""
        ...

    def flush_sum(self, chunk: int) -> None:
        """Has the shard apply what its sum holds."""
        ...

    def decide(self, verdict: QuorumDecision) -> None:
        """It is known whose contributions make the update of a round, on all chunks."""
        ...

    def change(self, change: Change) -> int:
        """Somebody takes part that did not, or no longer does. Returns the clock of who enters."""
        ...


class EventSchedule(Protocol):
    """Lets a shard's events happen. Every method is called on the event loop, and waits for nothing."""

    def begin(self, chunks: Chunks) -> None:
        """The model is registered."""
        ...

    def push(self, chunk: int, new: PushHeader, assign: bool, go: Go) -> None:
        """A contribution has come."""
        ...

    def ask(self, chunk: int, fetch: Fetched, terms: FetchTerms, go: Callable[[FetchTerms], None]) -> None:
        """A fetch has come, and waits for these terms."""
        ...

    def release(self, chunk: int, fetch: Fetched, go: Go) -> None:
        """A fetch may have a chunk."""
        ...

    def read(self, chunk: int, fetch: Fetched, clock: int) -> int:
        """It has it: as it is now. Returns the clock that it is told."""
        ...

    def change(self, change: Change, go: Callable[[], int]) -> int:
        """Somebody takes part that did not, or no longer does. Returns the clock that who enters is told."""
        ...

    def decide(self, verdict: QuorumDecision, go: Go) -> None:
        """A verdict has come."""
        ...

    def update(self, updating: Updating, go: Go) -> None:
        """The arithmetic of an update can begin."""
        ...

    def updated(self, updating: Updating) -> None:
        """It is done, and the state machine knows."""
        ...


class ArrivalOrder:
    """Everything happens as it comes."""

    def begin(self, chunks: Chunks) -> None:
        """Nothing depends on it."""

    def push(self, chunk: int, new: PushHeader, assign: bool, go: Go) -> None:
        """At once."""
        go()

    def ask(self, chunk: int, fetch: Fetched, terms: FetchTerms, go: Callable[[FetchTerms], None]) -> None:
        """At once."""
        go(terms)

    def release(self, chunk: int, fetch: Fetched, go: Go) -> None:
        """At once."""
        go()

    def read(self, chunk: int, fetch: Fetched, clock: int) -> int:
        """That of the chunk."""
        return clock

    def change(self, change: Change, go: Callable[[], int]) -> int:
        """At once."""
        return go()

    def decide(self, verdict: QuorumDecision, go: Go) -> None:
        """At once."""
        go()

    def update(self, updating: Updating, go: Go) -> None:
        """At once."""
        go()

    def updated(self, updating: Updating) -> None:
        """Nothing is noted."""
