"""What a shard is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gradstream.optim.base import Optimizer
from gradstream.optim.groups import GroupedRule
from gradstream.server.aggregation import AggregationRule
from gradstream.server.correction import Correction
from gradstream.server.shard.event_schedule import ArrivalOrder, EventSchedule

__all__ = ["FindOptimizer", "ShardConfig"]

FindOptimizer = Callable[[str], tuple[Optimizer, GroupedRule | None]]
"""Makes the update rule of what a registered model says of it."""


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """One shard's part of a run.

    Args:
        rank: which shard.
        num_shards: of how many.
        rule: the strategy's server half.
        optimizer: update rule.
        grouped: the same, where some parameters have settings of their own.
        silence_s: how long a reader may take nothing of what it asked for. A peer that must wait
            is told so four times in as long.
        find_optimizer: makes the update rule of what the registered model says of it, where it does.
        quorum: how many contributions make an update, the same ones on every chunk; None leaves it to the
            rule, chunk by chunk.
        resume_from: folder of the checkpoint that the run goes on from; "" where it begins.
        order: notes in which order things happen, or holds them to one.
        correction: what is done to a contribution before it is used; None for nothing.
        workers: how many there are, whose clocks are kept.
        decayed: gradients have their weight decay already; see `Strategy.decays_gradients`.
    """

    rank: int
    num_shards: int
    rule: AggregationRule
    optimizer: Optimizer
    silence_s: float = 30.0
    grouped: GroupedRule | None = None
    find_optimizer: FindOptimizer | None = None
    resume_from: str = ""
    quorum: int | None = None
    order: EventSchedule = field(default_factory=ArrivalOrder)
    correction: Correction | None = None
    workers: int = 0
    decayed: bool = False

    @property
    def waiting_every_s(self) -> float:
        """How often a peer that must wait is told so."""
        return self.silence_s / 4
