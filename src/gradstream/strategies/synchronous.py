"""Synchronous data-parallel SGD through the parameter server.

    g_i = Σ_{x ∈ B_i} ∇ℓ(w; x),   ĝ = Σ_i g_i / Σ_i |B_i|,   w ← Opt(w, ĝ)

All workers compute on the same version of w. The server makes one update of all their gradients, summed in the order
of ranks: so the same run has the same bits, whichever worker or network was faster. It equals one node with the
joined batch to the rounding of sums, where the loss is a mean or a sum over samples and looks at each sample alone.
With clipping, BatchNorm, dropout or a mean over tokens it does not, since these see a worker's own samples only (the
table in docs/strategies/synchronous.md). With `overlap` a chunk is sent as soon as backprop has finished with it,
updated as soon as every worker's has arrived, and fetched as soon as it is updated. Chunks do not wait for one
another, which changes no number.

Bytes a step and worker: 4N up, 4N down (float32). Another worker computes the part of a dead one, with the same bits,
until a new process takes it over. A worker without samples in a round tells the server so and contributes nothing;
so does one whose gradient is not finite.

    backup = b:  ĝ = Σ_{i ∈ A} g_i / Σ_{i ∈ A} |B_i|,   A the first N of N + b workers of this version

With backup workers a round does not wait for the slowest b workers, nor for b dead ones. The server refuses a late
gradient by its version, and its worker goes on with the newest parameters. The samples that a round leaves out are
not used again. Step time: the N-th shortest of N + b times. For exponential times with mean 1, in a round that all
workers begin together, that is Σ_{i=b+1}^{N+b} 1/i. One update has the same A on every chunk, so it is made when N
whole gradients have arrived: pushing still overlaps backprop, updating does not.

References: Chen et al. 2016 ("Revisiting distributed synchronous SGD") for backup workers; the joined-batch view and
layer-wise exchange are folklore, cf. Zinkevich et al. 2010 for the average, Zhang et al. 2017 ("Poseidon", wait-free
backprop) for the overlap.
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
    """The server: round r makes version r+1 out of one push from every worker.

    Args:
        num_workers: W.
        reduction: whether pushed gradients are means over their samples, or sums.
        backup: number of workers for which no round waits; a quorum decides which ones they are.
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
        """Whether a push is for a round that is over."""
        return new.round < version

    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """All pushes of this round, in the order of ranks; none before all have arrived."""
        present = {one.rank: one for one in parked if one.round == version}
        if len(present) < self.num_workers - self.backup:
            return ()
        return [present[rank] for rank in sorted(present)]

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """|B_i| / Σ|B| for means, 1 / Σ|B| for sums: the mean over the joined batch."""
        total = sum(one.samples for one in update) or 1
        return [(one.samples if self.reduction == "mean" else 1) / total for one in update]

    def awaited(self, version: int, parked: Sequence[PushHeader]) -> Sequence[str]:
        """The workers that have not pushed in this round yet."""
        present = {one.rank for one in parked if one.round == version}
        return [f"worker-{rank}" for rank in range(self.num_workers) if rank not in present]


@dataclass(frozen=True, slots=True)
class Synchronous(ServerStrategy):
    """Synchronous SGD; see the module.

    Args:
        overlap: exchange chunks during backprop; False exchanges after it, with the same bits.
        backup: b, number of workers for which no round waits, at least 0; see the module.
        sparse: exchange the touched rows of row-sparse tensors alone, with the same bits, for an update rule that
            leaves the other rows as they are. A gradient is then sent when all of it is computed.

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
    survives_worker_loss: ClassVar[bool] = True
    stands_in: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.backup < 0:
            raise ConfigError(f"Synchronous(backup={self.backup}): expected a number of workers, 0 or more")

    def quorum(self, num_workers: int) -> int | None:
        """N of the N + b workers make an update."""
        if self.backup >= num_workers:
            raise ConfigError(
                f"Synchronous(backup={self.backup}) with {num_workers} workers: no worker is left to wait for; "
                f"expected at most {num_workers - 1}"
            )
        return num_workers - self.backup if self.backup else None

    @property
    def gives_mean(self) -> bool:
        """See `Strategy.gives_mean`."""
        return not self.backup  # a late worker never sees the mean of the round

    def optimizer(self) -> Optimizer:
        """SGD with momentum."""
        return SGD(lr=0.01, momentum=0.9)

    async def train(self, worker: ServerWorker) -> None:
        """The client: each step computes on version r, contributes to round r, and takes version r+1."""
        await self._swap_in(worker, worker.server.fetch_soon())
        async for batch in worker.batches():
            gradient = worker.gradient_soon(batch)
            if not self.overlap:
                await gradient.done()
            await worker.server.push_soon(worker.update(gradient))
            if not self.overlap:
                await worker.server.flush()
            if self.backup:
                await gradient.done()  # a late worker fetches the newest version after its gradient
            updated = worker.server.fetch_soon(min_version=worker.version + 1)
            await gradient.done()
            await self._swap_in(worker, updated)
            if self.backup:
                await worker.server.flush()  # after it the worker knows whether its gradient was in time

    async def _swap_in(self, worker: ServerWorker, updated: Arrival) -> None:
        """Swaps in one version of all chunks: the round may have ended while a late worker fetched some of them."""
        await worker.swap_in(updated)
        while (newest := max(updated.versions, default=0)) > worker.version:
            updated = worker.server.fetch_soon(min_version=newest)
            await worker.swap_in(updated)

    def rows(self, tables: bool) -> RowExchange | None:
        """Touched rows alone, where `sparse` is True and the model has row-sparse tensors."""
        return RowExchange() if tables and self.sparse else None

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """One update a round; see `SynchronousRound`."""
        return SynchronousRound(num_workers, reduction, self.backup)
