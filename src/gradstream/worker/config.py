"""What a worker is told: its part of the job, as the plan hands it over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from gradstream.checkpoint.manifest import Resume
from gradstream.collectives.group import Group, GroupMembers
from gradstream.data.base import BatchPlan, Dataset
from gradstream.model.base import Layout, Model
from gradstream.optim.schedules import Rate
from gradstream.recording import Log
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.strategies.base import Strategy
from gradstream.telemetry.events import Event
from gradstream.transport.base import Endpoint
from gradstream.worker.evaluation import EvaluationPlan
from gradstream.worker.gradient import Clip
from gradstream.worker.observer import Observer
from gradstream.worker.replica.loop import Loop
from gradstream.worker.replica.updater import UpdateRule

__all__ = ["FormGroup", "WorkerConfig"]


class FormGroup(Protocol):
    """Makes a group; see `gradstream.collectives.factory.form_group`."""

    def __call__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        members: GroupMembers,
        *,
        on_event: Callable[[Event], None],
    ) -> Awaitable[Group]:
        """`on_event` hears how it sums."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a worker is told.

    Args:
        rank: of this worker.
        num_workers: W.
        strategy: what to run.
        model: this replica's own instance.
        data: the data set.
        plan: who goes through which sample.
        lr: learning rate of the update rule, or its schedule.
        clip: bounds of each gradient.
        evaluation: when held-out samples are looked at.
        seed: of the run.
        chunk_elems_of: elements per chunk, by the layout of the model.
        epochs, steps: when the run ends; one may be None. `steps` are those from here on.
        num_steps: the same of the whole run, where it is resumed.
        deadlines: how long the run waits for nodes that do not answer.
        loop: computes the gradients, where the user's own loop does; there is no plan then.
        optimizer: the update rule that this worker brings; "" where the shards know it.
        resume: where the run goes on, if it does not begin.
        joint: gradients alone are exchanged: the loop's own optimizer makes each step.
        balanced: shares of a round follow the measured speed of the workers.
        form_group: where the strategy goes through a group: makes it.
        log: what this worker is told, and cannot know again, is noted there; None notes nothing.
        watch: see `ReplicaContext`.
        update_rule: what this worker updates its parameters by; None where the shards have the rule.
        shards_rule: what the shards update theirs by, which local steps follow; None where workers have it.
    """

    rank: int
    num_workers: int
    strategy: Strategy
    model: Model
    data: Dataset
    plan: BatchPlan | None
    lr: Rate
    clip: Clip
    evaluation: EvaluationPlan
    seed: int
    chunk_elems_of: Callable[[Layout], int]
    epochs: int | None
    steps: int | None
    deadlines: Deadlines
    loop: Loop | None = None
    optimizer: str = ""
    num_steps: int | None = None
    resume: Resume | None = None
    joint: bool = False
    balanced: bool = False
    form_group: FormGroup | None = None
    update_rule: UpdateRule | None = None
    shards_rule: UpdateRule | None = None
    log: Log | None = None
    watch: Observer = field(default_factory=Observer)

    @property
    def chunk_elems(self) -> int:
        """Elements per chunk. Looks at the layout, which may build the model."""
        return self.chunk_elems_of(self.model.layout)
