"""Synchronous data-parallel SGD through the parameter server.

    g_i = Σ_{x ∈ B_i} ∇ℓ(w; x),   ĝ = Σ_i g_i / Σ_i |B_i|,   w ← Opt(w, ĝ)

All workers compute on the same version of w, and the server makes one update of all of them,
summed in the order of their ranks: so the run equals one node with the joined batch, whichever
worker or network was faster. A chunk leaves as soon as backprop has finished with it, is updated
as soon as every worker's has come, and fetched as soon as it is updated; chunks do not wait for
one another, which changes no number (`overlap`).

Bytes a step and worker: 4N up, 4N down (float32). A dead worker stops the run; a worker without
samples in a round says so and contributes nothing.

References: the joined-batch view and layer-wise exchange are folklore; cf. Zinkevich et al. 2010
for the average, Zhang et al. 2017 ("Poseidon", wait-free backprop) for the overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.rule import Contribution, Rule
from gradstream.strategies.base import Strategy, Worker

__all__ = ["Rounds", "Synchronous"]


@dataclass(frozen=True, slots=True)
class Rounds:
    """The server: round r makes version r+1 out of one contribution from every worker.

    Args:
        num_workers: W.
        reduction: whether contributions are means over their samples, or sums.
    """

    num_workers: int
    reduction: Reduction

    def drops(self, version: int, new: Contribution) -> bool:
        """A contribution to a round that is over."""
        return new.round < version

    def due(self, version: int, parked: Sequence[Contribution]) -> Sequence[Contribution]:
        """All W contributions of this round, in the order of ranks; none before they are all there."""
        present = {one.rank: one for one in parked if one.round == version}
        if len(present) < self.num_workers:
            return ()
        return [present[rank] for rank in range(self.num_workers)]

    def weights(self, version: int, update: Sequence[Contribution]) -> Sequence[float]:
        """|B_i| / Σ|B| for means, 1 / Σ|B| for sums: the mean over the joined batch."""
        total = sum(one.samples for one in update)
        return [(one.samples if self.reduction == "mean" else 1) / total for one in update]

    def awaited(self, version: int, parked: Sequence[Contribution]) -> Sequence[str]:
        """The workers that have not contributed to this round yet."""
        present = {one.rank for one in parked if one.round == version}
        return [f"worker-{rank}" for rank in range(self.num_workers) if rank not in present]


@dataclass(frozen=True, slots=True)
class Synchronous(Strategy):
    """Synchronous SGD; see the module.

    Args:
        overlap: exchange chunks while backprop goes on; False does one after the other, with
            the same bits.
    """

    overlap: bool = True

    cut: ClassVar[Literal["rounds", "partitions"]] = "rounds"
    survives_worker_loss: ClassVar[bool] = False

    def optimizer(self) -> Optimizer:
        """SGD with momentum."""
        return SGD(lr=0.01, momentum=0.9)

    async def train(self, worker: Worker) -> None:
        """The client: each step computes on version r, contributes to round r, and goes on with r+1."""
        await worker.adopt(worker.server.fetch_soon())
        async for batch in worker.batches():
            gradient = worker.gradient_soon(batch)
            if not self.overlap:
                await gradient.done()
            await worker.server.push_soon(worker.update(gradient))
            if not self.overlap:
                await worker.server.settle()
            updated = worker.server.fetch_soon(min_version=worker.version + 1)
            await gradient.done()
            await worker.adopt(updated)

    def rule(self, num_workers: int, reduction: Reduction) -> Rule:
        """See `Rounds`."""
        return Rounds(num_workers, reduction)
