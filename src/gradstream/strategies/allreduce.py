"""Synchronous data-parallel SGD without a server: the workers sum their gradients among themselves.

    g_i = ∇ℓ(w; B_i) on each worker i,   ĝ = Σ_i |B_i| g_i / Σ_i |B_i|   (allreduce),   w ← Opt(w, ĝ)

Each worker holds all parameters and makes the update itself, from the same bits. So all workers have the same
parameters after each round, and the run equals one node with the joined batch. It equals `Synchronous` bit for bit
where the group's algorithm sums in the order of ranks.

    sharded: a reduce-scatter in place of the allreduce. Each worker updates its own 1/W of w, with its own
    1/W of the optimizer's state, and an all-gather gives every worker all parameters.

Wait-free backprop: the vector is divided into buckets, in backward order. A bucket is sent as soon as backprop has
passed its end, and backprop continues meanwhile. The last bucket is sent when the whole gradient is known to be
finite, and the update is made when all buckets have arrived. So a worker that dies or fails in the middle of a round
leaves the others with the parameters of the last complete round. Where a gradient is not finite, all workers leave
its round out. The others then form another group, do that round again, and one of them computes the dead worker's part
from then on (`worker.group.exchange`). (With sharded=True a death ends the run, which goes back to its checkpoint.)

    bucket l ready at r_l, exchanged in a_l:  s_l = max(r_l, e_{l+1}),  e_l = s_l + a_l,  T = e_1 + t_update

Bytes a step and worker: 2·4N·(W-1)/W sent, by ring or halving-doubling (float32). A worker without samples in a round
contributes zeros.

References: Patarasuk and Yuan 2009 (the ring); Zhang and others 2017 ("Poseidon", wait-free backprop);
Rajbhandari and others 2020 ("ZeRO", whose first stage is `sharded`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from gradstream.collectives.algorithms import ALGORITHMS, PARTS
from gradstream.collectives.factory import KINDS, TORCH
from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.strategies.api import GroupWorker
from gradstream.strategies.base import GroupStrategy, check_flag, check_not_negative

EXCHANGES = ("auto", *TORCH)
KNOWN = tuple(kind for kind in KINDS if kind not in TORCH)


@dataclass(frozen=True, slots=True)
class AllReduce(GroupStrategy):
    """Synchronous SGD in a group of workers; see the module.

    Args:
        algorithm: algorithm of the sum: "auto" measures and chooses; "ring" and others are named.
        exchange: library that moves the bytes: "auto" is gradstream itself; "torch" is torch.distributed with a
            backend that suits; "gloo", "nccl" and "mpi" are its backends. Then torch chooses the algorithm.
        sharded: True lets each worker update its slice alone, so that the optimizer's state takes 1/W of the
            memory. None is True where all workers share memory, which then also holds one vector of parameters for
            all of them; else False. By messages, reduce-scatter and all-gather are the halves of `algorithm`; for
            "hierarchical", and for "halving-doubling" where W is not a power of two, they are those of a ring.
        overlap: exchange buckets during backprop; False exchanges after it, with the same bits.
        bucket_mib: size of a bucket, in MiB. Large buckets cause fewer delays, small ones are sent earlier. None
            is 4; where all workers share memory, a sixteenth of a large model, at most 16.

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

    partitioning: ClassVar[Partitioning] = "rounds"
    survives_worker_loss: ClassVar[bool] = True
    pipelined: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise UnknownNameError("exchange of AllReduce", str(self.exchange), EXCHANGES)
        if self.algorithm not in KNOWN:
            raise UnknownNameError("algorithm of AllReduce", str(self.algorithm), KNOWN)
        check_flag("AllReduce", "sharded", self.sharded, may_be_none=True)
        check_flag("AllReduce", "overlap", self.overlap)
        if self.bucket_mib is not None:
            check_not_negative("AllReduce", "bucket_mib", self.bucket_mib, "number of MiB")
        if self.exchange != "auto" and self.algorithm != "auto":
            raise ConfigError(
                f"AllReduce(exchange={self.exchange!r}, algorithm={self.algorithm!r}): torch.distributed "
                "chooses its algorithm itself; leave one of the two out"
            )
        if self.sharded and self.algorithm in ALGORITHMS and self.algorithm not in PARTS:
            raise ConfigError(
                f"AllReduce(algorithm={self.algorithm!r}, sharded=True): this algorithm has no reduce-scatter and "
                f"no all-gather; expected {', '.join(PARTS)}, or 'auto'"
            )
        if self.bucket_mib is not None and not 1e-4 <= self.bucket_mib <= 1 << 20:
            raise ConfigError(f"AllReduce(bucket_mib={self.bucket_mib}): expected MiB, 0.0001 to 1048576")

    @property
    def stands_in(self) -> bool:
        """See `Strategy.stands_in`: not where one worker alone has a part of the optimizer's state."""
        return self.exchange == "auto" and not self.sharded

    @property
    @override
    def gives_mean(self) -> bool:
        return True

    def optimizer(self) -> Optimizer:
        """SGD with momentum."""
        return SGD(lr=0.01, momentum=0.9)

    async def train(self, worker: GroupWorker) -> None:
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

    def bucket_elems(self, itemsize_bytes: int, chunk_elems: int) -> int:
        """`bucket_mib` in elements, a multiple of 64."""
        if self.bucket_mib is None:
            return GroupStrategy.bucket_elems(self, itemsize_bytes, chunk_elems)
        return max(64, int(self.bucket_mib * (1 << 20)) // itemsize_bytes // 64 * 64)
