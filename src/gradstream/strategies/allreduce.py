"""Synchronous data-parallel SGD without a server: the workers sum their gradients among themselves.

    g_i = ∇ℓ(w; B_i) on each worker i,   ĝ = Σ_i |B_i| g_i / Σ_i |B_i|   (allreduce),   w ← Opt(w, ĝ)

Every worker holds all parameters and makes the update itself, of the same bits: so all have the same
parameters after each round, and the run equals one node with the joined batch. It equals `Synchronous`
bit for bit where the group's algorithm sums in the order of ranks.

    sharded: reduce-scatter instead, each worker updates its own 1/W of w by its own 1/W of the
    optimizer's state, and all-gather brings the parameters together.

Wait-free backprop: the vector is cut into buckets, in backward order. A bucket leaves as soon as
backprop has passed its end, and backprop goes on meanwhile. The last one leaves when the whole gradient is
known to be finite, and the update is made when all buckets are there: so a worker that dies or fails in
the middle of a round leaves the others with the parameters of the last whole one. (Where they are updated
in shards, one that dies during the update itself leaves them undefined: what counts is the checkpoint.)

    bucket l ready at r_l, exchanged in a_l:  s_l = max(r_l, e_{l+1}),  e_l = s_l + a_l,  T = e_1 + t_update

Bytes a step and worker: 2·4N·(W-1)/W sent, by ring or halving-doubling (float32). A dead worker stops the
run, naming it; a worker without samples in a round contributes zeros.

References: Patarasuk and Yuan 2009 (the ring); Zhang and others 2017 ("Poseidon", wait-free backprop);
Rajbhandari and others 2020 ("ZeRO", whose first stage is `sharded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from gradstream.collectives.algorithms import ALGORITHMS, PARTS
from gradstream.collectives.factory import KINDS, TORCH
from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.model.base import Reduction
from gradstream.model.factors import FactoredLayer
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.strategies.api import Worker
from gradstream.strategies.base import Strategy
from gradstream.strategies.checks import check_flag, check_not_negative

__all__ = ["EXCHANGES", "AllReduce"]

EXCHANGES = ("auto", *TORCH)
KNOWN = tuple(kind for kind in KINDS if kind not in TORCH)


@dataclass(frozen=True, slots=True)
class AllReduce(Strategy):
    """Synchronous SGD in a group of workers; see the module.

    Args:
        algorithm: how the group sums: "auto" measures and chooses, else a name ("ring").
        exchange: who moves the bytes: "auto" is gradstream itself; "torch" is torch.distributed, with the
            backend that suits, or "gloo", "nccl" or "mpi" of it. Then torch has the algorithm.
        sharded: each worker updates its slice alone: the optimizer's state takes 1/W of the memory. None
            does so where the workers share memory, and parameters are one vector for all of them. By messages
            it takes the halves of `algorithm`: of "halving-doubling" those of a ring where the workers are no
            power of two, of "hierarchical" those of a ring too.
        overlap: exchange buckets while backprop goes on; False does one after the other, with the
            same bits.
        bucket_mib: size of a bucket, in MiB: large ones have fewer delays, small ones leave earlier. None is
            4; where all workers share memory, a sixteenth of a large model, up to 16.
        factors: whether the gradients of wide linear layers go as factors; None decides layer by layer,
            and never between workers of one machine, where bytes cost less than the arithmetic.

    Example:
        >>> strategy = gs.AllReduce(algorithm="ring")
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["servers"]
        (16, 0)
    """

    algorithm: str = "auto"
    exchange: str = "auto"
    sharded: bool | None = None
    overlap: bool = True
    bucket_mib: float | None = None
    factors: bool | None = None

    partitioning: ClassVar[Partitioning] = "rounds"
    survives_worker_loss: ClassVar[bool] = False
    through: ClassVar[Literal["servers", "group", "shared"]] = "group"

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise UnknownNameError("exchange of AllReduce", str(self.exchange), EXCHANGES)
        if self.algorithm not in KNOWN:
            raise UnknownNameError("algorithm of AllReduce", str(self.algorithm), KNOWN)
        check_flag("AllReduce", "sharded", self.sharded, may_be_none=True)
        check_flag("AllReduce", "overlap", self.overlap)
        check_flag("AllReduce", "factors", self.factors, may_be_none=True)
        if self.bucket_mib is not None:
            check_not_negative("AllReduce", "bucket_mib", self.bucket_mib, "number of MiB")
        if self.exchange != "auto" and self.algorithm != "auto":
            raise ConfigError(
                f"AllReduce(exchange={self.exchange!r}, algorithm={self.algorithm!r}): torch.distributed "
                "chooses its algorithm itself; leave one of the two out"
            )
        if self.factors and self.sharded:
            raise ConfigError(
                "AllReduce(factors=True, sharded=True): a worker that updates its slices alone needs "
                "no other part of the gradient; leave one of the two out"
            )
        if self.sharded and self.algorithm in ALGORITHMS and self.algorithm not in PARTS:
            raise ConfigError(
                f"AllReduce(algorithm={self.algorithm!r}, sharded=True): it has no reduce-scatter and no "
                f"all-gather of its own; expected {', '.join(PARTS)}, or 'auto'"
            )
        if self.bucket_mib is not None and not 1e-4 <= self.bucket_mib <= 1 << 20:
            raise ConfigError(f"AllReduce(bucket_mib={self.bucket_mib}): expected MiB, 0.0001 to 1048576")

    @property
    def gives_mean(self) -> bool:
        """See `Strategy.gives_mean`."""
        return True

    def optimizer(self) -> Optimizer:
        """SGD with momentum."""
        return SGD(lr=0.01, momentum=0.9)

    async def train(self, worker: Worker) -> None:
        """Each step computes on version r, and leaves all workers with version r+1."""
        group = worker.group
        reduce = group.reduce_scatter if group.sharded else group.allreduce
        async for batch in worker.batches():
            gradient = worker.gradient_soon(batch)
            if not self.overlap:
                await gradient.done()
            samples = await group.samples(gradient)
            weight = self.weight(worker.rank, samples, worker.reduction)
            for bucket in group.buckets:
                await reduce(gradient, bucket, weight)
            await group.update(gradient)
            if group.sharded:
                await group.all_gather()

    def weight(self, rank: int, samples: Sequence[int], reduction: Reduction) -> float:
        """|B_i| / Σ|B| for means, 1 / Σ|B| for sums: the mean over the joined batch."""
        total = sum(samples)
        return (samples[rank] if reduction == "mean" else 1) / total if total else 0.0

    def as_factors(self, layer: FactoredLayer, rows: int, workers: int, near: bool) -> bool:
        """Whether K(M+Q)(W-1) is less than 2·M·Q·(W-1)/W, of a layer of Q inputs and M outputs.

        That is what a worker sends in an all-gather of the factors, and in an allreduce of the gradient by
        ring or halving-doubling. (By one server it sends M·Q and gets as much, by the butterfly lg W · M·Q,
        at the root of a tree up to ⌈lg W⌉·M·Q.) Every worker then forms the product of the joined batch:
        2·K·W·M·Q operations where 2·K·M·Q made its own.
        """
        if self.factors is not None:
            return self.factors
        return not near and layer.factor_elems(rows) * workers < 2 * layer.elems

    def bucket_elems(self, itemsize_bytes: int, chunk_elems: int) -> int:
        """`bucket_mib`, in whole blocks of 64 elements."""
        if self.bucket_mib is None:
            return Strategy.bucket_elems(self, itemsize_bytes, chunk_elems)
        return max(64, int(self.bucket_mib * (1 << 20)) // itemsize_bytes // 64 * 64)
