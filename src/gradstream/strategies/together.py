"""Client and server of strategies in which an update takes one push from every worker that takes part.

A worker with nothing to do, at its end or while it is paused for a checkpoint, tells the servers so
(`server.client`). Updates then do not wait for it, nor for a lost worker. Its earlier pushes count.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from gradstream.server.aggregation import AggregationRule, PushHeader
from gradstream.strategies.api import ServerWorker
from gradstream.strategies.downpour import AsynchronousStrategy

# ---- together ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Barrier(AggregationRule):
    """Makes an update of the sum of all pushes that have come, once every worker that takes part has pushed.

    Args:
        present: ranks of the workers that take part.
    """

    present: frozenset[int]

    def among(self, present: frozenset[int]) -> Barrier:
        """The same rule for these workers."""
        return replace(self, present=present)

    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """All pushes that have arrived, in the order of ranks; none before there is one from every worker."""
        if not parked or self.present - {one.rank for one in parked}:
            return ()
        # A worker that was paused may push parameters while the others push the states beside theirs.
        vector = max(one.vector for one in parked)
        chosen = [one for one in parked if one.vector == vector]
        return sorted(chosen, key=lambda one: (one.rank, one.incarnation, one.sequence))

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """1 for each push."""
        return [1.0] * len(update)

    def awaited(self, version: int, parked: Sequence[PushHeader]) -> Sequence[str]:
        """The workers that have not pushed yet."""
        return [f"worker-{rank}" for rank in sorted(self.present - {one.rank for one in parked})]


async def train_together(
    worker: ServerWorker,
    every: int | None,
    push: Callable[[], Awaitable[None]],
    fetch: Callable[[], Awaitable[None]],
) -> None:
    """The client: a worker makes local steps by the run's rule, and exchanges with all others now and then.

    Args:
        worker: the argument of the strategy's `train`.
        every: local steps between two exchanges; None exchanges once, at the end.
        push: pushes the worker's result since the last exchange.
        fetch: fetches the result of the exchange, from which the next step begins.
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


# ---- stale -------------------------------------------------------------------------------
# The client of asynchronous SGD. The strategies that share it differ in how their server treats a late gradient.
#
#     repeat:   w ← fetch();   push(∇ℓ(w; batch))
#
# No worker waits for another, so other updates overtake a gradient while it is computed and sent. A dead worker stops
# no other. Bytes a step and worker: 4N up, 4N down (float32).


class StaleGradients(AsynchronousStrategy):
    """The base of strategies that push each gradient as soon as it is computed, late or not."""

    overlap: bool = False
    """Whether the next parameters are fetched while computing, at the price of one more step of delay."""

    async def train(self, worker: ServerWorker) -> None:
        """The client: each gradient is computed on the newest parameters, and pushed."""
        pending = worker.server.fetch_soon() if self.overlap else None
        async for batch in worker.batches():
            pending = await self.fetch(worker, pending, overlap=self.overlap)
            await worker.accumulate(await worker.gradient(batch))
            await worker.server.push_soon(worker.take_accumulated())
