"""What the node of a worker needs of its exchange, whether that goes through servers or a group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradstream.checkpoint.manifest import Resume
from gradstream.coordinator.client.member import Member
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.telemetry.events import Event, TransferEvent
from gradstream.telemetry.traffic import Transfer
from gradstream.transport.base import Endpoint
from gradstream.worker.replica.base import Replica

__all__ = ["Exchange", "ExchangeContext", "Transfers"]

MAX_TRANSFERS = 128
"""Transfers reported one by one between two reports of process metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """Where an exchange lives.

    Args:
        runtime, endpoint, member: of the node; the run has begun.
        rank: of this worker.
        resume: where the run goes on, if it does not begin.
        deadlines: how long the run waits for nodes that do not answer.
        init: fills a vector with the model's first parameters.
        is_lowest: whether this is the worker of the lowest rank that is still there.
        failed: says that this node cannot go on.
    """

    runtime: Runtime
    endpoint: Endpoint
    member: Member
    rank: int
    resume: Resume | None
    deadlines: Deadlines
    init: Callable[[Vector], Awaitable[None]]
    is_lowest: Callable[[], bool]
    failed: Callable[[Exception], Awaitable[None]]


class Exchange(Protocol):
    """One worker's exchange, from its first parameters to the final ones."""

    @property
    def replica(self) -> Replica:
        """What the strategy gets."""
        ...

    async def begin(self) -> None:
        """Sees to it that all workers have the same first parameters, or those of a checkpoint."""
        ...

    async def train(self) -> None:
        """Runs the client of the strategy."""
        ...

    async def flush(self) -> None:
        """Returns once everything that the strategy has given is in the model."""
        ...

    async def finish(self) -> None:
        """The final parameters are the replica's from here on."""
        ...

    def report(self) -> Sequence[Event]:
        """Records of traffic since the report before."""
        ...

    async def close(self) -> None:
        """Ends what goes on beside the strategy. Idempotent."""
        ...


class Transfers:
    """Reports transfers one by one, so many between two accounts.

    Args:
        rank: of this worker.
        emit: puts a record into the run's events.
    """

    def __init__(self, rank: int, emit: Callable[[Event], None]) -> None:
        self._rank = rank
        self._emit = emit
        self._left = MAX_TRANSFERS

    def __call__(self, done: Transfer) -> None:
        """One more is done."""
        if self._left > 0:
            self._left -= 1
            self._emit(
                TransferEvent(
                    rank=self._rank, kind=done.kind, seconds=done.seconds, size_bytes=done.size_bytes
                )
            )

    def accounted(self) -> None:
        """An account was given: as many again."""
        self._left = MAX_TRANSFERS
