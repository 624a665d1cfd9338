"""NoLoCo: workers train alone, and make an outer step with one other worker at a time instead of a collective.

    worker i, each round t:                                 j is the partner of i in round t, at random; n = 2
      θ_i ← φ_i;   H times:  θ_i ← InnerOpt(θ_i, ∇ℓ(θ_i; batch))
      Δ_i ← φ_i - θ_i;   exchanges (Δ_i, φ_i) for (Δ_j, φ_j)
      δ_i ← α·δ_i - β·(Δ_i + Δ_j)/n - γ·(φ_i - (φ_i + φ_j)/n)
      φ_i ← φ_i + δ_i

φ_i are the slow weights of worker i, and Δ_i is its pseudo-gradient, with the sign of `diloco`'s. The last term pulls
the slow weights of the pair together, so that workers stay near one another although they never exchange all together.
There is no server, no group, and no common round: a worker waits only for its partner. The pairs are a function of the
seed, the round, and the present workers: `strategies.matching`.

A worker without a partner, because the number is odd or the partner has died, makes the same step with n = 1: δ_i ←
α·δ_i - β·Δ_i. So with one worker it is `diloco` with outer_lr = β, outer_momentum = α, nesterov = False, to rounding.

The inner optimizer is the run's, and its state stays with each worker. The final model is the mean of all φ_i, and so
is that of a checkpoint, which has each worker's φ_i, δ_i and inner state besides. Evaluations during the run are of the
φ_i of the lowest rank, which costs no exchange.

Two workers that always exchange converge if 0 < γ < 2(1 + α), as the roots of λ² - (1 + α - γ)·λ + α show.

Bytes a round and worker: 8N up and 8N down (float32), whatever W is; a codec makes those of Δ_i fewer. A death costs
what it costs in `gossip`.

Reference: Kolehmainen, Blagoev, Donaghy, Ersoy, Nies, "NoLoCo: no-all-reduce low communication training method for
large models", 2025 (arXiv 2506.10911). The defaults are those of the authors' program for runs with a random partner:
α = 0.5, β = 0.7, and γ = β, after 50 steps of Adam. Different here: AdamW inside, as in `diloco`, and no random routes
through a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from gradstream.errors import ConfigError
from gradstream.optim import AdamW
from gradstream.optim.base import Optimizer
from gradstream.strategies.api import PeerWorker
from gradstream.strategies.base import PeerStrategy, check_count
from gradstream.strategies.matching import partner_of

VELOCITY = "velocity"
"""Name of δ, which a worker keeps from round to round."""


@dataclass(frozen=True, slots=True)
class NoLoCo(PeerStrategy):
    """Local training with an outer optimizer of pairs; see the module.

    Args:
        every: H, inner steps of each worker in a round, at least 1.
        outer_lr: β, rate of the outer gradients, > 0.
        outer_momentum: α, share of the outer velocity that each step keeps, in [0, 1).
        pull: γ, rate at which the slow weights of a pair come together, in (0, 2(1 + α)).

    Example:
        >>> strategy = gs.strategies.NoLoCo(every=4)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["servers"], run.summary["steps"]
        (0, 4)
    """

    every: int = 10
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    pull: float = 0.7

    plain: ClassVar[Mapping[str, object] | None] = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}

    def __post_init__(self) -> None:
        check_count("NoLoCo", "every", self.every, "steps")
        lr, momentum, pull = self.outer_lr, self.outer_momentum, self.pull
        for option, got in (("outer_lr", lr), ("outer_momentum", momentum), ("pull", pull)):
            if isinstance(got, bool) or not isinstance(got, int | float):
                raise ConfigError(
                    f"NoLoCo({option}={got!r}): expected a number; only the workers' optimizer can have a schedule"
                )
        if not 0 < lr < float("inf"):
            raise ConfigError(f"NoLoCo(outer_lr={lr!r}): expected a finite number above 0")
        if not 0 <= momentum < 1:
            raise ConfigError(f"NoLoCo(outer_momentum={momentum!r}): expected a number in [0, 1)")
        if not 0 < pull < 2 * (1 + momentum):
            raise ConfigError(
                f"NoLoCo(pull={pull!r}, outer_momentum={momentum!r}): expected a pull above 0 and below "
                f"{2 * (1 + momentum):g}: at 0 workers never come together, and from there on they fly apart"
            )

    @property
    def state_names(self) -> tuple[str, ...]:
        """See `PeerStrategy.state_names`: δ."""
        return (VELOCITY,)

    @property
    def encodes(self) -> bool:
        """See `PeerStrategy.encodes`: Δ, but not φ, which is whole parameters."""
        return True

    def optimizer(self) -> Optimizer:
        """AdamW on the workers."""
        return AdamW(lr=4e-4, weight_decay=0.1)

    async def train(self, worker: PeerWorker) -> None:
        """Each round begins with the slow weights of the round before, and ends with an outer step."""
        velocity = worker.state[VELOCITY]
        async for batch in worker.batches():
            slow, delta = worker.parameters, await worker.local_steps(batch)
            await worker.work(partial(to_delta, slow.tensor, delta.tensor), [slow], [delta])
            partner = partner_of(worker.rank, worker.seed, worker.version, worker.num_workers, worker.live)
            received = await worker.exchange_with(partner, [delta, slow])
            pair = None if received is None else (received[0].tensor, received[1].tensor)
            step = partial(self.outer_step, slow.tensor, delta.tensor, velocity.tensor, pair)
            await worker.work(step, [delta, *(received or ())], [slow, velocity])
            worker.go_on_from(slow)

    def outer_step(
        self,
        slow: torch.Tensor,
        delta: torch.Tensor,
        velocity: torch.Tensor,
        partner: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """δ ← α·δ - β·mean(Δ) - γ·(φ - mean(φ));  φ ← φ + δ, in place.

        Args:
            slow: φ, (E,), changed.
            delta: Δ, (E,).
            velocity: δ, (E,), changed.
            partner: Δ and φ of the partner; None without one.
        """
        velocity.mul_(self.outer_momentum)
        if partner is None:
            velocity.sub_(delta, alpha=self.outer_lr)
        else:
            their_delta, their_slow = partner
            velocity.sub_(delta + their_delta, alpha=self.outer_lr / 2)
            velocity.sub_(slow - their_slow, alpha=self.pull / 2)  # φ - (φ + φ') / 2
        slow.add_(velocity)


def to_delta(slow: torch.Tensor, local: torch.Tensor) -> None:
    """θ ← Δ = φ - θ."""
    torch.sub(slow, local, out=local)
