"""The configuration of a shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from gradstream.codec.base import Codec
from gradstream.optim.base import Optimizer
from gradstream.optim.groups import GroupedRule
from gradstream.server.aggregation import AggregationRule, Correction
from gradstream.server.shard.event_schedule import ArrivalOrder, EventSchedule
from gradstream.wire.chunks import Placement

Acknowledge = Literal["applied", "logged", "replicated"]

FindOptimizer = Callable[[str], tuple[Optimizer, GroupedRule | None]]
"""Makes the update rule that a registered model names."""


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """One shard's part of a run.

    Args:
        rank: rank of the shard.
        num_shards: number of shards of its placement; of a split model, those of its part.
        rule: the strategy's server half.
        optimizer: update rule.
        silence_s: a fetch ends with DeadlineError if its reader takes no chunk for this long, in seconds. In that
            time the shard tells a peer four times that it must wait.
        grouped: the update rule, where some parameters have settings of their own.
        find_optimizer: makes the update rule that the registered model names, if it names one.
        resume_from: folder of the checkpoint from which the run continues; "" for a new run.
        restores_state: the rule's state in that checkpoint is that of `optimizer`; else the state begins anew.
        renumbered: version of all chunks of that checkpoint, where another strategy has counted them; else None.
        quorum: least number of pushes to an update, the same pushes on every chunk; None lets the rule decide for
            each chunk. A decision may name more: rule, ledger and coordinator take as many as it names.
        schedule: decides when the shard's events happen: as they come, or as they were recorded.
        correction: changes a push before the shard uses it; None for no change.
        workers: number of workers at the beginning, whose clocks the shard keeps.
        grows: whether more workers may come.
        acknowledge: when the shard acknowledges a push: "applied", or once a backup has the result, "logged" in a
            file or "replicated" on the next shard.
        retry_s: how long a full disk, or the shard that keeps the backup, is waited for, in seconds.
        part: the part of a split model that it holds, with the other shards of that part.
        first: rank of the first shard of its placement.
        decayed: whether gradients contain their weight decay already; see `ServerStrategy.decays_gradients`.
        codec: decodes chunks that workers have encoded; None if they send none.
        fetch_codec: encodes parameters that workers fetch for gradients; None sends them as they are.
        in_passes: whether workers carry out a procedure, and push portions of passes; see `Strategy.in_passes`.
        noise_scale: whether to measure what the gradient noise scale needs; see `telemetry.meters`.
    """

    rank: int
    num_shards: int
    rule: AggregationRule
    optimizer: Optimizer
    silence_s: float = 30.0
    grouped: GroupedRule | None = None
    find_optimizer: FindOptimizer | None = None
    resume_from: str = ""
    restores_state: bool = True
    renumbered: int | None = None
    quorum: int | None = None
    schedule: EventSchedule = field(default_factory=ArrivalOrder)
    correction: Correction | None = None
    workers: int = 0
    grows: bool = False
    part: int = 0
    decayed: bool = False
    acknowledge: Acknowledge = "applied"
    retry_s: float = 120.0
    first: int = 0
    in_passes: bool = False
    noise_scale: bool = False
    codec: Codec | None = None
    fetch_codec: Codec | None = None

    @property
    def placement(self) -> Placement:
        """The shards that hold the parameters together with this one."""
        return Placement(self.first, self.num_shards)

    @property
    def index(self) -> int:
        """Number of this shard in its placement, from 0."""
        return self.rank - self.first

    @property
    def backup_holder(self) -> str:
        """Name of the shard that keeps the backup of this one."""
        return self.placement.names[(self.index + 1) % self.num_shards]

    @property
    def backed_up_here(self) -> int:
        """Number in the placement of the shard whose backup this one keeps."""
        return (self.index - 1) % self.num_shards

    @property
    def waiting_every_s(self) -> float:
        """Seconds between two messages to a peer that must wait."""
        return self.silence_s / 4
