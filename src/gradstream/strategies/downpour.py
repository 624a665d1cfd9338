"""Downpour SGD: asynchronous replicas around a sharded parameter server.

    client, at step t:                                   server, on each push:
      every n_fetch steps:  w ← fetch()                    w ← w - γ·acc / √(Σ acc²)    (Adagrad)
      v ← μ·v + ∇ℓ(w; batch) + λ·w
      acc ← acc + η/γ·v;  w ← w - α·v
      every n_push steps:   push(acc);  acc ← 0

No replica waits for another. `overlap=False` is the literal algorithm with the fetch after the
push: a worker reads its own pushes, and one worker with n_push = n_fetch = k is k-step local SGD.
`overlap=True` lets both travel while the next minibatches are computed: the parameters adopted
were asked for one period ago, and one worker is SGD with that delay.

Bytes a step and worker: 4N/n_push up, 4N/n_fetch down (float32). A dead worker stops nobody;
samples it had not got acknowledged are taken over by the others. What one push brings is applied
chunk by chunk: two chunks may show different numbers of updates at one instant, as in the paper.

Every step has its weight decay λ and, under a schedule, its own rate η: the server applies a sum at the rate
γ of the sum's first step, and each step joins it with the weight η/γ, which is 1 at a constant rate. So k
local steps are those of SGD. A rule with state (momentum on the server, Adagrad, Adam) makes one update a
push, of that sum, at γ. AdamW takes its decay off the parameters, so that comes once an update. α is η, or
`local_lr`, which follows the schedule; a group of parameters multiplies α and γ by its `lr_scale`.

    drive:  warm start    one replica alone, until so many samples are in the model
            waves         the others join, so many at a time
            finish alone  one replica alone again, for the last so many samples

Alone a replica is plain SGD by the server's rule: it fetches before each gradient and pushes after it, goes
through all of the data in the order in which one node would, and Adagrad's sums go on from there.

Reference: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, Algorithm 1.1 and §4.1.
Different here: a push is due after step n_push - 1, not before step 0, so that a fetch finds the
worker's own progress; Adagrad divides by √(Σ acc²) + ε, as the paper's rate is 0/0 at first. The paper
has no momentum, no weight decay and no schedule: μ = λ = 0, η = γ. With a long period and γ = α/W for W
workers, which makes the server take the mean of their progress, momentum is what brings accuracy back to that
of one machine (see docs/strategies/downpour.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError
from gradstream.model.base import Reduction
from gradstream.optim import Adagrad
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, EveryPush
from gradstream.server.client.arrival import Arrival
from gradstream.strategies.amount import amount
from gradstream.strategies.api import Participation, ServerWorker
from gradstream.strategies.base import RowExchange, ServerStrategy
from gradstream.strategies.checks import check_count, check_not_negative
from gradstream.wire.chunks import MAX_CHUNK_ELEMS

__all__ = ["ALONE", "TOGETHER", "Downpour"]

ALONE, TOGETHER = "alone", "together"
"""Phases of its drive."""


@dataclass(frozen=True, slots=True)
class Downpour(ServerStrategy):
    """Downpour SGD; see the module.

    Args:
        push_every: n_push, in steps.
        fetch_every: n_fetch, in steps.
        overlap: exchange while computing, at the price of one more period of delay.
        local_lr: α of the local steps between two fetches, where fetch_every is above 1; the optimizer's
            rate if None.
        local_momentum: μ of the local steps, in [0, 1). Each worker keeps its v over all fetches.
        warm_start: one replica goes first: a number of samples, or of data epochs ("0.5epochs").
        waves: in how many waves the others join after it.
        wave_every: how long a wave trains before the next one joins, as `warm_start`; 0 is as long as that.
        finish_alone: one replica goes through the last samples of the run, as `warm_start`.
        significance: θ: only rows of acc that would change their parameters by more than this share of them
            are pushed, the others when they have grown; 0 pushes everything.
        significance_of: "relative" to the parameters' size, or "absolute".
        block_elems: what is in no row-sparse tensor is looked at in rows of so many elements.

    Example:
        >>> strategy = gs.Downpour(push_every=2)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["pushes"]
        (16, 9)
    """

    push_every: int = 1
    fetch_every: int = 1
    overlap: bool = True
    local_lr: float | None = None
    local_momentum: float = 0.0
    warm_start: int | str = 0
    waves: int = 1
    wave_every: int | str = 0
    finish_alone: int | str = 0
    significance: float = 0.0
    significance_of: Literal["relative", "absolute"] = "relative"
    block_elems: int = 16

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True
    plain: ClassVar[Mapping[str, object] | None] = {
        "push_every": 1,
        "fetch_every": 1,
        "overlap": False,
        "local_lr": None,
        "local_momentum": 0.0,
        "significance": 0.0,
        "significance_of": "relative",
    }

    def __post_init__(self) -> None:
        for name, what in (("push_every", "steps"), ("fetch_every", "steps"), ("waves", "waves")):
            check_count("Downpour", name, getattr(self, name), what)
        self._check_local_steps()
        self._check_drive()
        self._check_significance()

    def _check_local_steps(self) -> None:
        if not 0.0 <= self.local_momentum < 1.0:
            raise ConfigError(f"Downpour(local_momentum={self.local_momentum}): expected 0 or more, below 1")
        if self.local_lr is None:
            return
        check_not_negative("Downpour", "local_lr", self.local_lr, "rate")
        if self.fetch_every == 1:
            raise ConfigError(
                f"Downpour(local_lr={self.local_lr}, fetch_every=1): each step begins with a fetch, which "
                "takes the local step before it back; take a longer fetch_every, or leave local_lr out"
            )

    def _check_drive(self) -> None:
        for name in ("warm_start", "wave_every", "finish_alone"):
            amount(f"Downpour.{name}", getattr(self, name))
        if self.waves > 1 and not (self.warm_start or self.wave_every):
            raise ConfigError(
                f"Downpour(waves={self.waves}): expected wave_every, how long a wave trains before the next "
                "one joins, since there is no warm start for it to be as long as"
            )
        if self.waves == 1 and self.wave_every:
            raise ConfigError(
                f"Downpour(wave_every={self.wave_every!r}): no wave comes after the only one; say how many "
                "there are, waves=2 or more, or leave wave_every out"
            )

    def _check_significance(self) -> None:
        if not 0.0 <= self.significance < math.inf:
            raise ConfigError(f"Downpour(significance={self.significance}): expected 0 or more")
        if self.significance_of not in ("relative", "absolute"):
            raise ConfigError(
                f"Downpour(significance_of={self.significance_of!r}): expected 'relative' or 'absolute'"
            )
        if self.significance_of == "absolute" and not self.significance:
            raise ConfigError(
                "Downpour(significance_of='absolute', significance=0.0): everything is significant; "
                "say from which size on, as significance"
            )
        if self.significance and self.local_momentum:
            raise ConfigError(
                f"Downpour(significance={self.significance}, local_momentum={self.local_momentum}): momentum "
                "moves every parameter at every step; use one of the two"
            )
        if not 1 <= self.block_elems <= MAX_CHUNK_ELEMS:
            raise ConfigError(f"Downpour(block_elems={self.block_elems}): expected 1 to {MAX_CHUNK_ELEMS}")

    @property
    def decays_gradients(self) -> bool:
        """Where several gradients lie between two pushes or two fetches, or join in a velocity."""
        return self.push_every > 1 or self.fetch_every > 1 or self.local_momentum > 0

    def optimizer(self) -> Optimizer:
        """Adagrad, which the paper found to make asynchrony robust.

        Its sums start above zero: the first updates, which several workers compute on the same
        parameters, would otherwise each be a full step of the rate in every coordinate.
        """
        return Adagrad(lr=0.01, initial_accumulator=0.01)

    async def train(self, worker: ServerWorker) -> None:
        """The client, Algorithm 1.1."""
        asked: Arrival | None = None
        async for batch in worker.batches():
            alone = worker.phase == ALONE
            if alone or worker.since % self.fetch_every == 0:
                asked = await self._fetch(worker, asked, overlap=self.overlap and not alone)
            gradient = await worker.gradient(batch)
            if alone:
                await worker.accumulate(gradient)
            else:
                await worker.local_step(gradient, self.local_lr, momentum=self.local_momentum)
            if alone or (worker.since + 1) % self.push_every == 0:
                await worker.server.push_soon(worker.take_accumulated())

    async def _fetch(self, worker: ServerWorker, asked: Arrival | None, *, overlap: bool) -> Arrival | None:
        """Adopts what was asked for a period ago, or else what is newest. Returns what is asked for now."""
        if asked is not None:
            await worker.swap_in(asked)
        if not overlap:
            await worker.pull()
            return None
        if worker.since == 0:  # what was asked for before is of another phase
            await worker.swap_in(worker.server.fetch_soon())
        return worker.server.fetch_soon()

    def drives(self) -> bool:
        """Whether somebody is to begin, join or end apart from the others."""
        return bool(self.warm_start or self.finish_alone) or self.waves > 1

    async def drive(self, run: Participation) -> None:
        """Warm start, waves, and the end by one replica."""
        num_workers = len(run.workers)
        warm, between, last = (
            amount(name, getattr(self, name)).of(run.num_samples)
            for name in ("warm_start", "wave_every", "finish_alone")
        )
        between = between or warm
        if warm + (self.waves - 1) * between + last >= run.total_samples:
            raise ConfigError(
                f"{self}: its begin and its end take all of the {run.total_samples:,} samples of the run; "
                "nothing is left for all workers together"
            )
        if warm:
            await run.set_active_workers(1, ALONE)
            await run.until(samples=warm)
        for wave in range(self.waves):
            await run.until(samples=warm + wave * between)
            await run.set_active_workers(math.ceil(num_workers * (wave + 1) / self.waves), TOGETHER)
        if last:
            await run.until(samples=run.total_samples - last)
            await run.set_active_workers(0, TOGETHER)
            await run.set_active_workers(1, ALONE)

    def rows(self, tables: bool) -> RowExchange | None:
        """Only what has changed is exchanged, where few rows have, or few are significant."""
        if not tables and not self.significance:
            return None
        return RowExchange(self.significance, self.significance_of == "relative", self.block_elems)

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """Every push is an update of its own, as it comes."""
        return EveryPush()
