"""`WorkerConfig`: one process's part of the run's plan."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, cast

from gradstream.collectives.group import Group, GroupMembers
from gradstream.coordinator.lifecycle import LossTolerance
from gradstream.data.base import BatchPlan
from gradstream.data.plan import EpochPlan
from gradstream.job.job import OwnData
from gradstream.job.losses import losses_of
from gradstream.job.overrides import optimizer_of_text
from gradstream.job.plan import RunPlan
from gradstream.model.base import Model
from gradstream.recording import Log
from gradstream.runtime.base import Runtime
from gradstream.telemetry.events import Event
from gradstream.transport.base import Endpoint
from gradstream.wire.chunks import role_of_part
from gradstream.worker.computed import Observer
from gradstream.worker.gradient import Clip
from gradstream.worker.loop import Loop
from gradstream.worker.updater import UpdateRule


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
        """Makes the group; `on_event` is called with events that describe it."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The run's plan, and the rank and part of this process. Derived values are computed once.

    Args:
        plan: the run's plan, on which all nodes agree.
        rank: rank of the worker.
        part: the part of its replica that this process holds; part 0 is the worker.
        model: this process's instance of the model, or of its part.
        form_group: makes the group, for strategies that exchange in a group.
        log: records everything that a replay could not reconstruct; None records nothing.
        watch: see `ReplicaContext`.
    """

    plan: RunPlan
    rank: int
    model: Model
    form_group: FormGroup
    part: int = 0
    log: Log | None = None
    watch: Observer = field(default_factory=Observer)

    @cached_property
    def losses(self) -> LossTolerance:
        """How the run tolerates the loss of a worker."""
        return losses_of(self.plan)

    @cached_property
    def batch_plan(self) -> BatchPlan | None:
        """Division of the data into minibatches; None if a user's loop brings its own."""
        return None if self.plan.open_ended else self.plan.batch_plan()

    @cached_property
    def loop(self) -> Loop | None:
        """The user's loop, if one computes the gradients."""
        return None if self._own is None else cast(Loop, self._own.loop(self.rank))

    @property
    def _own(self) -> OwnData | None:
        return cast(OwnData, self.plan.job.data) if self.plan.open_ended else None

    @cached_property
    def clip(self) -> Clip:
        """Limits for each gradient."""
        return Clip(self.plan.job.clip_norm, self.plan.job.clip_value)

    @property
    def registered_rule(self) -> str:
        """The update rule that the user's loop requests, as text; "" if all nodes know the rule."""
        served = self.plan.served
        return self._own.optimizer if self._own and (served is None or served.pushes == "gradients") else ""

    @cached_property
    def update_rule(self) -> UpdateRule:
        """The rule that updates the parameters, on the workers or on the shards."""
        plan, own = self.plan, self._own
        if plan.averages_gradients or plan.strategy.local_rounds:
            return plan.shards_optimizer, None
        if own is not None and own.optimizer:
            return optimizer_of_text(own.optimizer)
        return plan.optimizer, plan.grouped(self.model)

    @cached_property
    def inner_rule(self) -> UpdateRule | None:
        """The rule of a worker's local steps between two exchanges without servers.

        None if there are none, or a user's loop makes them.
        """
        if not self.plan.strategy.local_rounds or self.plan.open_ended:
            return None
        return self.plan.optimizer, self.plan.grouped(self.model)

    @property
    def first_step(self) -> int:
        """Number of this worker's first step; 0 unless the run is resumed."""
        return 0 if self.plan.resume is None else self.plan.resume.step_of(f"worker-{self.rank}")

    @property
    def first_version(self) -> int:
        """Version of the parameters with which this plan begins."""
        plan = self.plan
        return 0 if plan.averages_gradients or plan.resume is None else plan.resume.rounds

    @property
    def micro_batch_samples(self) -> int:
        """Largest number of samples in a micro-batch of a split replica."""
        plan, all_samples = self.batch_plan, self.plan.job.data.num_samples or 0
        largest = max(plan.batch_sizes) if isinstance(plan, EpochPlan) else all_samples
        return -(-largest // self.plan.job.micro_batches)

    @property
    def role(self) -> str:
        """Role of the nodes that this node exchanges with: the workers, or the same part of each replica."""
        return role_of_part(self.part)

    @property
    def chunk_elems(self) -> int:
        """Number of elements of a chunk. Reads the layout, which may build the model."""
        return self.plan.chunk_elems_of(self.model.layout)
