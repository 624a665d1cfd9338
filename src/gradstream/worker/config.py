"""What one process of a replica has of the run's plan."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, cast

from gradstream.collectives.group import Group, GroupMembers
from gradstream.coordinator.phases import LossTolerance
from gradstream.data.base import BatchPlan
from gradstream.data.plan import EpochPlan
from gradstream.job.job import OwnData
from gradstream.job.losses import losses_of
from gradstream.job.overrides import optimizer_of_text
from gradstream.job.plan import RunPlan
from gradstream.model.base import Model
from gradstream.optim.merge import Replace
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
    """The run's plan, and whose part of it a process has. What follows from both is computed once.

    Args:
        run: the plan, on which all nodes agree.
        rank: rank of the worker.
        part: the part of its replica that this process holds; part 0 is the worker.
        model: this process's own instance of the model, or of its part.
        form_group: makes the group, for strategies that exchange in one.
        log: recording of everything that a replay could not find out again; None records nothing.
        watch: see `ReplicaContext`.
    """

    run: RunPlan
    rank: int
    model: Model
    form_group: FormGroup
    part: int = 0
    log: Log | None = None
    watch: Observer = field(default_factory=Observer)

    @cached_property
    def losses(self) -> LossTolerance:
        """What becomes of the run when a worker dies."""
        return losses_of(self.run)

    @cached_property
    def plan(self) -> BatchPlan | None:
        """Division of the data into minibatches; None if a loop of the user's brings its own."""
        return None if self.run.open_ended else self.run.batch_plan()

    @cached_property
    def loop(self) -> Loop | None:
        """The user's loop, where one computes the gradients."""
        return None if self._own is None else cast(Loop, self._own.loop(self.rank))

    @property
    def _own(self) -> OwnData | None:
        return cast(OwnData, self.run.job.data) if self.run.open_ended else None

    @cached_property
    def clip(self) -> Clip:
        """Bounds of each gradient."""
        return Clip(self.run.job.clip_norm, self.run.job.clip_value)

    @property
    def registered_rule(self) -> str:
        """The update rule that the user's loop asks for, as text; "" if all nodes know the rule."""
        served = self.run.served
        return self._own.optimizer if self._own and (served is None or served.pushes == "gradients") else ""

    @cached_property
    def update_rule(self) -> UpdateRule:
        """The rule that updates the parameters, on the workers or on the shards."""
        run, own = self.run, self._own
        if run.gradients_only:
            return Replace(), None
        if run.strategy.trains_locally:
            return run.shards_optimizer, None
        if own is not None and own.optimizer:
            return optimizer_of_text(own.optimizer)
        return run.optimizer, run.grouped(self.model)

    @cached_property
    def inner_rule(self) -> UpdateRule | None:
        """The rule of the steps that a worker makes alone between two exchanges without servers.

        None if it makes none, or a loop of the user's does.
        """
        if not self.run.strategy.trains_locally or self.run.open_ended:
            return None
        return self.run.optimizer, self.run.grouped(self.model)

    @property
    def first_step(self) -> int:
        """Number of this worker's first step; not 0 where the run is resumed."""
        return 0 if self.run.resume is None else self.run.resume.step_of(f"worker-{self.rank}")

    @property
    def micro_batch_samples(self) -> int:
        """Number of samples that a micro-batch of a split replica has at most."""
        plan, all_samples = self.plan, self.run.job.data.num_samples or 0
        most = max(plan.batch_sizes) if isinstance(plan, EpochPlan) else all_samples
        return -(-most // self.run.job.micro_batches)

    @property
    def role(self) -> str:
        """Role of the nodes with which this one exchanges: the workers, or the same parts of their replicas."""
        return role_of_part(self.part)

    @property
    def chunk_elems(self) -> int:
        """Number of elements of a chunk. Reads the layout, which may build the model."""
        return self.run.chunk_elems_of(self.model.layout)
