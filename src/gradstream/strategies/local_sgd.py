"""Local SGD in a group: workers train alone for H steps, and the mean of their pseudo-gradients makes the outer step.

    worker i, each round:                                   in the group, after H steps of each:
      w_i ← w                                                 Δ ← Σ n_i·Δ_i / Σ n_i
      H times:  w_i ← InnerOpt(w_i, ∇ℓ(w_i; batch))           v ← μ·v + Δ
      Δ_i ← w - w_i                                           w ← w - ν·(Δ + μ·v)        every worker for itself

With ν = 1 and μ = 0 (the defaults) w becomes the mean of the w_i, weighted by samples n_i: local SGD. With ν = 0.7 and
μ = 0.9 it is DiLoCo without a server, where minibatches have equal sizes: DiLoCo's mean counts workers, not samples.
With `nesterov=False`, w ← w - ν·v, it is SlowMo. With one worker it is the inner optimizer alone, to the rounding of
w - (w - w_i). In a phase after `allreduce` it is post-local SGD.

A round is a step of the run: `steps`, schedules and `evaluate_every` count rounds of H minibatches of each worker. The
rate of the inner optimizer, which is the run's, is the same within a round. Its state (Adam's moments, say) stays with
each worker, and is in no checkpoint. v is, and all workers have the same.

With `delay` = d the exchange is hidden behind the last d minibatches of the round (DaSGD). Δ_i is then how far the
worker has come without them; u_i, how far they have led it, is in the Δ_i of its next round, which begins from w - u_i:

    w_i ← w - u_i;   H - d minibatches;   Δ_i ← w - w_i;   w_i' ← w_i
    allreduce of the Δ_i   ║   d minibatches on w_i;   u_i ← w_i' - w_i

So every step of every worker is in the sum of exactly one round. The last round of `epochs` or `steps` has d = 0, so
the final model has them all; w, which evaluations in between see, and with which a run ends early (`until`, a stop), is
without the last d minibatches of each worker. With d = H, round r exchanges what round r - 1 has computed, and the
first one zeros. Checkpoints have the u_i. A lost worker takes its own along; one that stands in for it waits for its
exchanges (d = 0).

Bytes a round and worker: those of an allreduce of the parameters, 2(W - 1)/W · 4N in a ring; with a codec those of
`worker.group.coded_sums`. All workers wait for the slowest once a round. A death or a newcomer is met as under
allreduce: the round begins anew, from w, and another worker computes the part of the lost one until a new process takes
its place.

References: Stich, "Local SGD converges fast and communicates little", 2019; Lin, Stich, Patel, Jaggi, "Don't use large
mini-batches, use local SGD", 2020 (post-local); Douillard and others, "DiLoCo", 2023; Wang, Tantia, Ballas, Rabbat,
"SlowMo", 2020; Zhou and others, "DaSGD: squeezing SGD parallelization performance in distributed training using delayed
averaging", 2020 (arXiv 2006.00441).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.strategies.api import GroupWorker
from gradstream.strategies.base import GroupStrategy, check_count, check_flag
from gradstream.strategies.matching import outer_sgd


@dataclass(frozen=True, slots=True)
class LocalSGD(GroupStrategy):
    """Local training in a group without servers, with an outer optimizer; see the module.

    Args:
        every: H, minibatches of each worker in a round, at least 1.
        outer_lr: ν, learning rate of the outer steps, > 0.
        outer_momentum: μ, share of the outer velocity that each step keeps, in [0, 1).
        nesterov: True is Nesterov's outer momentum, False the plain one, as in SlowMo; without effect at μ = 0.
        delay: d, minibatches that a worker continues with while an exchange is in progress, 0 to `every`. Worth its two
            further vectors of memory where an exchange takes as long as a few minibatches.

    Example:
        >>> strategy = gs.LocalSGD(every=4)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["servers"], run.summary["steps"]
        (0, 4)
    """

    every: int = 10
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = True
    delay: int = 0

    partitioning: ClassVar[Partitioning] = "rounds"
    survives_worker_loss: ClassVar[bool] = True
    plain: ClassVar[Mapping[str, object] | None] = {"every": 1, "delay": 0}

    def __post_init__(self) -> None:
        check_count("LocalSGD", "every", self.every, "minibatches")
        check_flag("LocalSGD", "nesterov", self.nesterov)
        check_count("LocalSGD", "delay", self.delay, "minibatches", least=0)
        if self.delay > self.every:
            raise ConfigError(
                f"LocalSGD(every={self.every}, delay={self.delay}): expected a delay of at most {self.every} "
                "minibatches, since a round has no more"
            )
        self.outer_rule()  # raises

    @property
    def stands_in(self) -> bool:
        """See `Strategy.stands_in`: a round begins from parameters that all have."""
        return True

    @property
    @override
    def local_steps(self) -> int:
        return self.every

    def bucket_elems(self, itemsize_bytes: int, chunk_elems: int) -> int:
        """All at once: nothing of Δ is known before the last step, and each exchange waits for the links' latency."""
        del itemsize_bytes, chunk_elems
        return 1 << 40

    def optimizer(self) -> Optimizer:
        """SGD with momentum, on each worker."""
        return SGD(lr=0.01, momentum=0.9)

    def outer_rule(self) -> Optimizer:
        """SGD with Nesterov's momentum, which every worker applies to the mean."""
        return outer_sgd("LocalSGD", self.outer_lr, self.outer_momentum, nesterov=self.nesterov)

    async def train(self, worker: GroupWorker) -> None:
        """Each round computes on version r, and leaves all workers with version r+1.

        `gradient_soon` trains on all minibatches but the last `delay`, and continues with these by itself; `update`
        waits for them.
        """
        group = worker.group
        async for batch in worker.batches():
            pseudo_gradient = worker.gradient_soon(batch)
            samples = await group.samples(pseudo_gradient)
            weight = self.weight(worker.rank, samples, worker.reduction)
            for bucket in group.buckets:
                await group.allreduce(pseudo_gradient, bucket, weight)
            await group.update(pseudo_gradient)
