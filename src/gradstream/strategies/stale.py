"""The client of asynchronous SGD. The strategies that share it differ in how their server treats a late gradient.

    repeat:   w ← fetch();   push(∇ℓ(w; batch))

No worker waits for another, so other updates overtake a gradient while it is computed and sent. A dead worker
stops no other. Bytes a step and worker: 4N up, 4N down (float32).
"""

from __future__ import annotations

from gradstream.strategies.api import ServerWorker
from gradstream.strategies.downpour import StagedStrategy


class StaleGradients(StagedStrategy):
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
