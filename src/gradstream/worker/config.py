"""The configuration of a worker: its part of the run's plan."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from gradstream.checkpoint.manifest import Resume
from gradstream.codec.base import Codec
from gradstream.codec.low_rank import PowerSGD
from gradstream.collectives.group import Group, GroupMembers
from gradstream.data.base import BatchPlan, Dataset
from gradstream.data.plan import EpochPlan
from gradstream.model.base import Layout, Model
from gradstream.optim.schedules import Rate
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.recording import Log
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.strategies.base import Strategy
from gradstream.telemetry.events import Event
from gradstream.transport.base import Endpoint
from gradstream.wire.chunks import role_of_part
from gradstream.worker.computed import Observer
from gradstream.worker.evaluation import EvaluationPlan
from gradstream.worker.gradient import Clip
from gradstream.worker.loop import Loop
from gradstream.worker.replica.updater import UpdateRule


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


@dataclass(frozen=True, slots=True)
class Split:
    """A process's place in a replica of several.

    Args:
        part: the part that it holds; part 0 is the worker.
        parts: number of parts.
        pipeline: name of the schedule by which the parts compute, or how they train apart.
        micro_batches: number of micro-batches of a minibatch.
        recompute: whether parts drop activations, and compute them again before a backward pass.
        pipeline_dtype: dtype of activations, and of their gradients, on their way between parts; None is their own.
    """

    part: int
    parts: int
    pipeline: str | Hybrid | SyntheticGradients
    micro_batches: int
    recompute: bool = False
    pipeline_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The configuration of a worker.

    Args:
        rank: rank of this worker.
        split: the part of its replica that this process holds; None if the replica is one process.
        num_workers: number of workers, W.
        strategy: strategy of the run.
        model: this worker's own instance of the model.
        data: the data set.
        plan: division of the data into minibatches; None if a user's loop brings its own.
        lr: learning rate of the update rule, or a schedule of it.
        clip: bounds of each gradient.
        evaluation: when the run evaluates the model, and by which metrics.
        seed: seed of the run.
        deadlines: how long the run waits for nodes that do not answer.
        chunk_elems_of: number of elements of a chunk, for a layout of the model.
        epochs: number of data epochs after which the run ends, or None.
        steps: number of steps from here on after which the run ends, or None.
        num_steps: number of steps of the whole run, where `steps` counts only those after a resume.
        loop: the user's loop, where one computes the gradients.
        optimizer: the update rule that the user's loop asks for; "" if the shards know the rule.
        resume: where the run continues; None if it begins.
        gradients_only: whether only gradients are exchanged; then the loop's own optimizer makes each step.
        stands_in: the workers compute the parts of lost ones in each round.
        restores_state: the rule's state in the checkpoint is that of `update_rule`; else the state begins anew.
        remainders: names what workers keep that they have not sent, as `RunPlan.remainders` does; "" if nothing.
        replicas: names what a checkpoint has of each worker, as `RunPlan.replicas` does; "" if nothing.
        leaves_out: rounds go on without a lost worker.
        renumbered: version of the checkpoint's parameters, where another strategy has counted them; else None.
        looks_first: workers look at their links before the first minibatch: see `worker.exchange.first_look`.
        measures: workers measure the variance of their gradients: see `coordinator.variance_test`.
        ends_run: the run ends with this plan, and is not followed by another phase of the job.
        skips_non_finite: a gradient that is not finite is left out; else it ends the run.
        balanced: the workers' shares of a round follow their measured speed.
        form_group: makes the group, for strategies that exchange in one.
        log: recording of everything that a replay could not find out again; None records nothing.
        watch: see `ReplicaContext`.
        update_rule: rule for updates of the parameters.
        inner_rule: rule of the steps that a worker makes alone, between two updates of a group by `update_rule`, or
            two exchanges with a partner; None if it makes none.
        redoes: this worker redoes pushes of lost workers that are torn; see `worker.exchange.errands`.
        codec: encodes what the worker pushes; None pushes it as it is.
        fetch_codec: see `RunPlan.fetch_codec`.
        noise_scale: the workers measure what the gradient noise scale needs, where they have no servers that do.
        workers_optimize: workers apply `update_rule` to their own parameters; else the shards apply it to theirs.
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
    update_rule: UpdateRule
    workers_optimize: bool
    chunk_elems_of: Callable[[Layout], int]
    epochs: int | None
    steps: int | None
    deadlines: Deadlines
    split: Split | None = None
    loop: Loop | None = None
    inner_rule: UpdateRule | None = None
    optimizer: str = ""
    num_steps: int | None = None
    resume: Resume | None = None
    gradients_only: bool = False
    stands_in: bool = False
    restores_state: bool = True
    remainders: str = ""
    replicas: str = ""
    leaves_out: bool = False
    renumbered: int | None = None
    looks_first: bool = False
    measures: bool = False
    ends_run: bool = True
    skips_non_finite: bool = False
    balanced: bool = False
    redoes: bool = False
    noise_scale: bool = False
    codec: Codec | PowerSGD | None = None
    fetch_codec: Codec | None = None
    form_group: FormGroup | None = None
    log: Log | None = None
    watch: Observer = field(default_factory=Observer)

    @property
    def first_step(self) -> int:
        """Number of this worker's first step; not 0 where the run is resumed."""
        return 0 if self.resume is None else self.resume.step_of(f"worker-{self.rank}")

    @property
    def micro_batch_samples(self) -> int:
        """Number of samples that a micro-batch of a split replica has at most."""
        assert self.split is not None
        plan, all_samples = self.plan, self.data.num_samples or 0
        most = max(plan.batch_sizes) if isinstance(plan, EpochPlan) else all_samples
        return -(-most // self.split.micro_batches)

    @property
    def role(self) -> str:
        """Role of the nodes with which this one exchanges: the workers, or the same parts of their replicas."""
        return role_of_part(0 if self.split is None else self.split.part)

    @property
    def chunk_elems(self) -> int:
        """Number of elements of a chunk. Reads the layout, which may build the model."""
        return self.chunk_elems_of(self.model.layout)
