"""A worker's exchange as its node sees it, for every way of exchange."""

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
"""Number of transfers that are reported one by one between two reports of process metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """A worker's place in the run, for its exchange.

    Args:
        runtime: runtime of the worker's node.
        endpoint: endpoint of the worker's node.
        member: the node's membership; the run has begun.
        rank: rank of this worker.
        resume: where the run continues; None if it begins.
        deadlines: how long the run waits for nodes that do not answer.
        init: fills a vector with the model's first parameters.
        is_lowest: whether this is the worker of the lowest rank that is still there.
        failed: reports that this node cannot continue.
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
        """The worker that the strategy gets."""
        ...

    async def begin(self) -> None:
        """Gives all workers the same first parameters, or those of a checkpoint."""
        ...

    async def train(self) -> None:
        """Runs the strategy on this worker."""
        ...

    async def flush(self) -> None:
        """Returns when everything that the strategy has pushed is in the model."""
        ...

    async def finish(self) -> None:
        """Gets the final parameters into the replica."""
        ...

    def report(self) -> Sequence[Event]:
        """Events of the traffic since the last report."""
        ...

    async def close(self) -> None:
        """Ends all tasks that run beside the strategy. Idempotent."""
        ...


class Transfers:
    """Reports transfers one by one, up to `MAX_TRANSFERS` between two accounts.

    Args:
        rank: rank of this worker.
        emit: adds an event to those of the run.
    """

    def __init__(self, rank: int, emit: Callable[[Event], None]) -> None:
        self._rank = rank
        self._emit = emit
        self._left = MAX_TRANSFERS

    def __call__(self, done: Transfer) -> None:
        """Reports a transfer that is done."""
        if self._left > 0:
            self._left -= 1
            self._emit(
                TransferEvent(
                    rank=self._rank, kind=done.kind, seconds=done.seconds, size_bytes=done.size_bytes
                )
            )

    def accounted(self) -> None:
        """Notes that an account was given: as many transfers are reported again."""
        self._left = MAX_TRANSFERS
