"""Both halves of strategies whose workers exchange at the same time: an update is of all who take part.

A worker that has nothing to do, at its end or while it stands for a cut, says so (`server.pause`), and is
not waited for; nor is one that is lost. What it had pushed before counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from gradstream.server.aggregation import AggregationRule, PushHeader
from gradstream.strategies.api import ServerWorker

__all__ = ["Barrier", "train_together"]


@dataclass(frozen=True, slots=True)
class Barrier(AggregationRule):
    """One contribution of every worker that takes part makes an update, their sum.

    A push that comes late joins the update after it.

    Args:
        present: ranks of the workers that take part.
    """

    present: frozenset[int]

    def among(self, present: frozenset[int]) -> Barrier:
        """The same, of these workers."""
        return replace(self, present=present)

    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """All that are there, in the order of ranks; none before every worker has brought one."""
        if not parked or self.present - {one.rank for one in parked}:
            return ()
        # Who has been away is at parameters where others are still at what goes with theirs.
        vector = max(one.vector for one in parked)
        chosen = [one for one in parked if one.vector == vector]
        return sorted(chosen, key=lambda one: (one.rank, one.incarnation, one.sequence))

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """1."""
        return [1.0] * len(update)

    def awaited(self, version: int, parked: Sequence[PushHeader]) -> Sequence[str]:
        """The workers that have not contributed yet."""
        return [f"worker-{rank}" for rank in sorted(self.present - {one.rank for one in parked})]


async def train_together(
    worker: ServerWorker,
    every: int | None,
    push: Callable[[], Awaitable[None]],
    fetch: Callable[[], Awaitable[None]],
) -> None:
    """The client: steps of a worker's own by the run's rule, which bring it to an exchange with all others.

    Args:
        worker: of the strategy's `train`.
        every: steps between two exchanges; None has one alone, at the end.
        push: brings into the model what has been computed since the last exchange.
        fetch: takes what has come of it, where the next step begins.
    """

    async def flush() -> None:
        if worker.unpushed:
            await push()
        await worker.server.flush()

    await fetch()
    async for batch in worker.batches(flush, waited_for=True):
        if worker.resumed:
            await fetch()
        await worker.optimize(await worker.gradient(batch))
        if worker.unpushed == every:
            await push()
            await fetch()
