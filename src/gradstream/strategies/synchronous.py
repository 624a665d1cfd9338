"""Synchronous data-parallel SGD through the parameter server.

    g_i = Σ_{x ∈ B_i} ∇ℓ(w; x),   ĝ = Σ_i g_i / Σ_i |B_i|,   w ← Opt(w, ĝ)

All workers compute on the same version of w, and the server makes one update of all of them,
summed in the order of their ranks: so the same run has the same bits, whichever worker or network was
faster. It equals one node with the joined batch to the rounding of sums, where the loss is a mean or sum over
samples that looks at each of them alone: not with clipping, BatchNorm, dropout or a mean over tokens, which
see a worker's own samples (the table in docs/strategies/synchronous.md). A chunk leaves as soon as backprop
has finished with it, is updated as soon as every worker's has come, and fetched as soon as it is updated;
chunks do not wait for one another, which changes no number (`overlap`).

Bytes a step and worker: 4N up, 4N down (float32). A dead worker stops the run; a worker without
samples in a round says so and contributes nothing.

    backup = b:  ĝ = Σ_{i ∈ A} g_i / Σ_{i ∈ A} |B_i|,   A the first N of N + b workers of this version

With backup workers nobody waits for the slowest b, nor for the dead: a gradient that comes late is
refused by its version, and its worker goes on with the newest parameters. What a round leaves out of
the data is not given again. Step time: the N-th of N + b times; of exponential ones with mean 1 in a
round that all begin together Σ_{i=b+1}^{N+b} 1/i. One update has the same A on every chunk, so it is
made when N whole gradients have come: pushing still overlaps backprop, updating does not.

References: Chen et al. 2016 ("Revisiting distributed synchronous SGD") for backup workers; the
joined-batch view and layer-wise exchange are folklore, cf. Zinkevich et al. 2010 for the average, Zhang
et al. 2017 ("Poseidon", wait-free backprop) for the overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError
from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, PushHeader
from gradstream.server.client.arrival import Arrival
from gradstream.strategies.api import ServerWorker
from gradstream.strategies.base import RowExchange, ServerStrategy

__all__ = ["Synchronous", "SynchronousRound"]


@dataclass(frozen=True, slots=True)
class SynchronousRound(AggregationRule):
    """The server: round r makes version r+1 out of one contribution from every worker.

    Args:
        num_workers: W.
        reduction: whether contributions are means over their samples, or sums.
        backup: so many workers are not waited for; which, a quorum decides.
    """

    by_round: ClassVar[bool] = True

    num_workers: int
    reduction: Reduction
    backup: int = 0

    @property
    def paced(self) -> bool:
        """See `AggregationRule.paced`."""
        return not self.backup

    def drops(self, version: int, new: PushHeader) -> bool:
        """A contribution to a round that is over."""
        return new.round < version

    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """All contributions of this round, in the order of ranks; none before they are all there."""
        present = {one.rank: one for one in parked if one.round == version}
        if len(present) < self.num_workers - self.backup:
            return ()
        return [present[rank] for rank in sorted(present)]

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """|B_i| / Σ|B| for means, 1 / Σ|B| for sums: the mean over the joined batch."""
        total = sum(one.samples for one in update) or 1
        return [(one.samples if self.reduction == "mean" else 1) / total for one in update]

    def awaited(self, version: int, parked: Sequence[PushHeader]) -> Sequence[str]:
        """The workers that have not contributed to this round yet."""
        present = {one.rank for one in parked if one.round == version}
        return [f"worker-{rank}" for rank in range(self.num_workers) if rank not in present]


@dataclass(frozen=True, slots=True)
class Synchronous(ServerStrategy):
    """Synchronous SGD; see the module.

    Args:
        overlap: exchange chunks while backprop goes on; False does one after the other, with
            the same bits.
        backup: b workers of all are not waited for, at least 0; see the module.
        sparse: of row-sparse tensors exchange the touched rows alone, with the same bits; for an update rule
            that leaves the others as they are. A gradient then leaves when all of it is there.

    Example:
        >>> strategy = gs.Synchronous()
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["staleness_max"]
        (16, 0)
    """

    overlap: bool = True
    backup: int = 0
    sparse: bool = False

    partitioning: ClassVar[Partitioning] = "rounds"
    survives_worker_loss: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.backup < 0:
            raise ConfigError(f"Synchronous(backup={self.backup}): expected a number of workers, 0 or more")

    def quorum(self, num_workers: int) -> int | None:
        """N of the N + b workers make an update."""
        if self.backup >= num_workers:
            raise ConfigError(
                f"Synchronous(backup={self.backup}) with {num_workers} workers: nobody is left to wait for; "
                f"expected at most {num_workers - 1}"
            )
        return num_workers - self.backup if self.backup else None

    @property
    def gives_mean(self) -> bool:
        """See `Strategy.gives_mean`."""
        return not self.backup  # who is late never sees the mean of the round

    def optimizer(self) -> Optimizer:
        """SGD with momentum."""
        return SGD(lr=0.01, momentum=0.9)

    async def train(self, worker: ServerWorker) -> None:
        """The client: each step computes on version r, contributes to round r, and goes on with r+1."""
        await self._adopt(worker, worker.server.fetch_soon())
        async for batch in worker.batches():
            gradient = worker.gradient_soon(batch)
            if not self.overlap:
                await gradient.done()
            await worker.server.push_soon(worker.update(gradient))
            if not self.overlap:
                await worker.server.flush()
            if self.backup:
                await gradient.done()  # who is late wants what is newest when it is done
            updated = worker.server.fetch_soon(min_version=worker.version + 1)
            await gradient.done()
            await self._adopt(worker, updated)
            if self.backup:
                await worker.server.flush()  # it is known whether the gradient came in time

    async def _adopt(self, worker: ServerWorker, updated: Arrival) -> None:
        """Adopts one version of all chunks: others may have gone on while a late worker fetched them."""
        await worker.swap_in(updated)
        while (newest := max(updated.versions, default=0)) > worker.version:
            updated = worker.server.fetch_soon(min_version=newest)
            await worker.swap_in(updated)

    def rows(self, tables: bool) -> RowExchange | None:
        """Only what has changed is exchanged, where that is asked for and there are tables."""
        return RowExchange() if tables and self.sparse else None

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """See `SynchronousRound`."""
        return SynchronousRound(num_workers, reduction, self.backup)
