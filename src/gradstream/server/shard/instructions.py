"""What the state machine of a shard (`state.py`) has the executor do."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from gradstream.server.aggregation import PushHeader

Token = Hashable

Sender = tuple[str, int]
"""Name and incarnation of a node that pushes."""

Outcome = Literal["applied", "duplicate", "dropped"]


@dataclass(frozen=True, slots=True)
class Parked:
    """One chunk of a push that waits for its update.

    Args:
        header: the chunk's header.
        token: identifies the push, with its elements and the stream that waits for the result.
        assign: whether the push brings initial parameters, for a chunk that has none yet.
    """

    header: PushHeader
    token: Token
    assign: bool = False


@dataclass(frozen=True, slots=True)
class Apply:
    """Compute this update, then call `applied(chunk)`.

    Args:
        chunk: number of the chunk.
        update: pushes to add up; none where only the sum is to be applied.
        step: number of the update on this chunk, from 1.
        lr: learning rate of the update, and of the sum: the first rate above 0 among its pushes, and the weight of each
            push contains the push's own rate divided by this one. Under a robust rule the median of the rates.
        summed: number of pushes in the chunk's sum, which these pushes join.
        completes: whether to apply the sum with these pushes; else they only join it.
        distances: those of the quorum's decision, if it has any.
    """

    chunk: int
    update: tuple[Parked, ...]
    step: int
    lr: float = 0.0
    summed: int = 0
    completes: bool = True
    distances: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the sender the outcome of its chunk. A push that has joined a sum counts as applied."""

    token: Token
    chunk: int
    sequence: int
    outcome: Outcome
    version: int
    staleness: int


@dataclass(frozen=True, slots=True)
class Release:
    """Send this chunk to the fetch, as it is at that time."""

    token: Token
    chunk: int


@dataclass(frozen=True, slots=True)
class Supersede:
    """End the stream of this push: a retry waits in its place on a chunk, with the header and elements of the first."""

    token: Token
    chunk: int
    retry: Token


Instruction = Apply | Acknowledge | Release | Supersede
