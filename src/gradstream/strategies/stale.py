"""The client of asynchronous SGD, which strategies share that differ in what their server does with late gradients.

    repeat:   w ← fetch();   push(∇ℓ(w; batch))

No worker waits for another, so other updates overtake a gradient while it is computed and sent. A dead worker
stops no other. Bytes a step and worker: 4N up, 4N down (float32).
"""

from __future__ import annotations

from typing import ClassVar

from gradstream.data.base import Partitioning
from gradstream.strategies.api import ServerWorker
from gradstream.strategies.base import ServerStrategy

__all__ = ["StaleGradients"]


class StaleGradients(ServerStrategy):
    """The base of strategies that push each gradient as soon as it is computed, late or not."""

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True

    overlap: bool = False
    """Whether the next parameters are fetched while computing, at the price of one more step of delay."""

    async def train(self, worker: ServerWorker) -> None:
        """The client: each gradient is computed on the newest parameters, and pushed."""
        asked = worker.server.fetch_soon() if self.overlap else None
        async for batch in worker.batches():
            if asked is None:
                await worker.pull()
            else:
                await worker.swap_in(asked)
                asked = worker.server.fetch_soon()
            await worker.accumulate(await worker.gradient(batch))
            await worker.server.push_soon(worker.take_accumulated())
