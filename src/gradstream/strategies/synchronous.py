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
gradient by its version, and its worker continues with the newest parameters. The samples that a round leaves out are
not used again. Step time: the N-th shortest of N + b times. For exponential times with mean 1, in a round that all
workers begin together, that is Σ_{i=b+1}^{N+b} 1/i. One update has the same A on every chunk, so it is made when N
whole gradients have arrived: pushing still overlaps backprop, updating does not.

References: Chen et al. 2016 ("Revisiting distributed synchronous SGD") for backup workers; the joined-batch view and
layer-wise exchange are folklore, cf. Zinkevich et al. 2010 for the average, Zhang et al. 2017 ("Poseidon", wait-free
backprop) for the overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import (
    AggregationRule,
    CenteredClipping,
    ClippedMean,
    Krum,
    Median,
    PushHeader,
    RobustRule,
    TrimmedMean,
    WholeRule,
)
from gradstream.server.client.fetch import Arrival
from gradstream.server.client.push import Update
from gradstream.strategies.api import Gradient, ServerWorker
from gradstream.strategies.base import RowExchange, ServerStrategy, check_count

AGGREGATES: dict[str, tuple[str, ...]] = {
    "mean": (),
    "median": (),
    "trimmed-mean": ("faulty",),
    "krum": ("faulty", "keep"),
    "clipped-mean": ("radius",),
    "centered-clipping": ("radius",),
}
"""The options that each takes."""


@dataclass(frozen=True, slots=True)
class SynchronousRound(AggregationRule):
    """The server: round r makes version r+1 out of one push from every worker.

    Args:
        num_workers: W.
        reduction: whether pushed gradients are means over their samples, or sums.
        backup: number of workers for which no round waits; a quorum decides which ones they are.
        robust: how contributions become one, each a mean over its samples; None for the mean over the joined batch.
        scale: factor of each contribution.
        means: whether contributions are means already, whatever `reduction` says.
    """

    by_round: ClassVar[bool] = True

    num_workers: int
    reduction: Reduction
    backup: int = 0
    robust: RobustRule | None = None
    scale: float = 1.0
    means: bool = False

    @property
    @override
    def paced(self) -> bool:
        return not self.backup and not isinstance(self.robust, WholeRule)

    def drops(self, version: int, new: PushHeader) -> bool:
        """Whether a push is for a round that is over."""
        return new.round < version

    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """The first push of each worker in this round, in the order of ranks; none before all have arrived."""
        present = {one.rank: one for one in reversed(parked) if one.round == version}
        if len(present) < self.num_workers - self.backup:
            return ()
        return [present[rank] for rank in sorted(present)]

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """|B_i| / Σ|B| for means, 1 / Σ|B| for sums: the mean over the joined batch. With `robust`, each one's mean."""
        means = self.means or self.reduction == "mean"
        if self.robust is not None:
            return [self.scale if means else self.scale / max(1, one.samples) for one in update]
        total = sum(one.samples for one in update) or 1
        return [self.scale * (one.samples if means else 1) / total for one in update]

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
        aggregate: how the contributions of a round become one: "mean", or by a rule that wrong ones cannot move far,
            "median", "trimmed-mean", "krum", "clipped-mean" or "centered-clipping"; see `server/aggregation.py`.
        faulty: f, largest number of wrong contributions in a round, for "trimmed-mean" and "krum".
        keep: m, number of contributions that "krum" takes the mean of.
        radius: τ, largest length of a contribution ("clipped-mean"), or of its distance to the update before
            ("centered-clipping").
        worker_momentum: β. With β > 0 a worker contributes m ← β·m + (1 - β)·g in place of its gradient g, so that
            small constant attacks do not hide behind the noise of single gradients. Nothing then leaves during
            backprop.

    Example:
        >>> strategy = gs.Synchronous()
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["staleness_max"]
        (16, 0)
    """

    overlap: bool = True
    backup: int = 0
    sparse: bool = False
    aggregate: str = "mean"
    faulty: int = 0
    keep: int = 1
    radius: float | None = None
    worker_momentum: float = 0.0

    partitioning: ClassVar[Partitioning] = "rounds"
    survives_worker_loss: ClassVar[bool] = True
    pipelined: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.backup < 0:
            raise ConfigError(f"Synchronous(backup={self.backup}): expected a number of workers, 0 or more")
        if not 0.0 <= self.worker_momentum < 1.0:
            raise ConfigError(
                f"Synchronous(worker_momentum={self.worker_momentum}): expected 0 or more, below 1"
            )
        self._check_aggregate()

    def _check_aggregate(self) -> None:
        if self.aggregate not in AGGREGATES:
            raise UnknownNameError("aggregate of Synchronous", str(self.aggregate), AGGREGATES)
        what, takes = f"Synchronous(aggregate={self.aggregate!r}", AGGREGATES[self.aggregate]
        check_count("Synchronous", "faulty", self.faulty, "workers", least=0)
        check_count("Synchronous", "keep", self.keep, "contributions")
        for option, default in (("faulty", 0), ("keep", 1), ("radius", None)):
            if option not in takes and getattr(self, option) != default:
                raise ConfigError(
                    f"{what}, {option}={getattr(self, option)}): only others take it; leave it out"
                )
        if "radius" in takes and not (isinstance(self.radius, int | float) and 0 < self.radius < math.inf):
            raise ConfigError(f"{what}, radius={self.radius!r}): expected a finite length above 0")
        if self.aggregate != "mean" and (self.backup or self.sparse):
            option = "backup" if self.backup else "sparse"
            raise ConfigError(
                f"{what}, {option}={getattr(self, option)}): a robust rule needs the whole contribution of every "
                "worker; leave out one of the two"
            )

    def _robust(self, num_workers: int) -> RobustRule | None:
        """The rule that `aggregate` names. Raises ConfigError if it promises nothing with this many workers."""
        rule: RobustRule | None = None
        match self.aggregate:
            case "median":
                rule = Median()
            case "trimmed-mean":
                rule = TrimmedMean(self.faulty)
            case "krum":
                rule = Krum(self.faulty, self.keep)
            case "clipped-mean":
                rule = ClippedMean(float(self.radius or 0.0))
            case "centered-clipping":
                rule = CenteredClipping(float(self.radius or 0.0))
        if rule is not None:
            rule.check(num_workers)
        return rule

    def quorum(self, num_workers: int) -> int | None:
        """N of the N + b workers make an update; all of them, where distances over whole gradients decide."""
        if isinstance(self._robust(num_workers), WholeRule):
            return num_workers
        if self.backup >= num_workers:
            raise ConfigError(
                f"Synchronous(backup={self.backup}) with {num_workers} workers: no worker is left to wait for; "
                f"expected at most {num_workers - 1}"
            )
        return num_workers - self.backup if self.backup else None

    @property
    def stands_in(self) -> bool:
        """See `ServerStrategy.stands_in`: not with momentum, which is a worker's own."""
        return not self.worker_momentum

    @property
    @override
    def gives_mean(self) -> bool:
        # A late worker never sees the mean of the round.
        return not (self.backup or self.worker_momentum) and self.aggregate == "mean"

    def optimizer(self) -> Optimizer:
        """SGD with momentum."""
        return SGD(lr=0.01, momentum=0.9)

    async def train(self, worker: ServerWorker) -> None:
        """The client: each step computes on version r, contributes to round r, and takes version r+1."""
        await self._swap_in(worker, worker.server.fetch_soon())
        async for batch in worker.batches():
            if self.worker_momentum:
                gradient = await worker.gradient(batch)
                await worker.server.push_soon(await self._momentum(worker, gradient))
            else:
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

    async def _momentum(self, worker: ServerWorker, gradient: Gradient) -> Update:
        """The velocity of this worker's gradients, for the current round."""
        if not gradient.samples:
            return worker.update(gradient)
        await worker.local_step(gradient, 0.0, momentum=self.worker_momentum)
        update = worker.take_accumulated()
        update.round = worker.version
        return update

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
        return SynchronousRound(
            num_workers,
            reduction,
            self.backup,
            self._robust(num_workers),
            scale=1.0 - self.worker_momentum,
            means=self.worker_momentum > 0,
        )
