"""What all nodes of a run agree on: the job as `run.planning` resolved it, and what follows from it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from gradstream.checkpoint.folder import Policy
from gradstream.checkpoint.manifest import JobPhase, Resume
from gradstream.codec.base import Codec
from gradstream.codec.low_rank import PowerSGD
from gradstream.codec.named import of_parameters
from gradstream.coordinator.growing_batches import VarianceTest
from gradstream.coordinator.link_choice import LinkChoice
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.coordinator.stopping import Until
from gradstream.data.base import BatchPlan, DataProgress, Partitioning, PartitionSpec
from gradstream.data.feed import QueuePlan, plan_of
from gradstream.data.ledger import Ledger
from gradstream.data.loader import LoaderDataset
from gradstream.data.open_ledger import OpenLedger
from gradstream.data.plan import JoinedPlan, RoundPlan
from gradstream.data.shares import MEASURED
from gradstream.errors import ConfigError
from gradstream.job.descriptions import describe
from gradstream.job.job import Job, OwnData, is_open_ended
from gradstream.job.metrics import Metric
from gradstream.job.phase_jobs import AUTO, MEASURES
from gradstream.job.registry import name_of
from gradstream.job.traits import traits_of
from gradstream.model.base import Layout, Model
from gradstream.optim.base import ByShape, Optimizer
from gradstream.optim.groups import GroupedRule, ParameterGroup
from gradstream.optim.merge import Outer, PassSum, Replace
from gradstream.optim.schedules import Position
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.split.part_model import PartModel, whole_layout_of
from gradstream.strategies.base import (
    GroupStrategy,
    PeerStrategy,
    ServerStrategy,
    Strategy,
)
from gradstream.traits import refuse
from gradstream.transport.base import Identity
from gradstream.wire.chunks import (
    CHUNK_ELEMS,
    MAX_CHUNK_ELEMS,
    member_name,
    parted_chunk_elems,
    shared_chunk_elems,
)


def shard_name(rank: int) -> str:
    """Node name of a shard."""
    return f"shard-{rank}"


def worker_name(rank: int) -> str:
    """Node name of a worker."""
    return f"worker-{rank}"


Every = int | Literal["epoch"]
"""Number of steps between two evaluations; or "epoch" for one after each data epoch."""


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """When a run evaluates its model, and by which metrics.

    Args:
        every: see `Every`; None for never.
        metrics: the user's metrics, by name.
        goals: figures of an evaluation that can end the run: "accuracy", "test_loss".
        keep_best: whether the parameters with the best evaluation are kept.
        until: says which evaluation is the best, if it monitors a figure.
    """

    every: Every | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    goals: Collection[str] = ()
    keep_best: bool = False
    until: Until | None = None

    def period(self, position: Position) -> int | None:
        """Number of steps between two evaluations; None for no evaluations."""
        return position.steps_per_epoch if self.every == "epoch" else self.every


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A resolved and checked job, on which all nodes of a run agree.

    Args:
        id: name of the run; its nodes refuse those of other runs.
        job: the job as the user asked for it.
        strategy: the job's strategy.
        optimizer: the job's update rule, or the strategy's if the job has none.
        codec: encodes what workers push; None pushes full precision.
        servers: number of shards of the parameter server, of all parts together.
        chunk_elems: elements per chunk; None, in shared memory, derives them from the size of the model.
        groups: parameters with settings of their own.
        evaluation: when held-out samples are evaluated.
        policy: when checkpoints are made; None makes none, not even when the run is stopped.
        resume: where the run continues; None if it is new.
        whole: the job with all of its phases, if it has any; `job` is then that of one phase.
        phase: which phase that is, and where it began.
        every: the plans of all phases, as if each began the run; () without phases.
    """

    id: str
    job: Job
    strategy: Strategy
    optimizer: Optimizer
    servers: int
    chunk_elems: int | None
    codec: Codec | PowerSGD | None = None
    groups: tuple[ParameterGroup, ...] = ()
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    policy: Policy | None = None
    resume: Resume | None = None
    whole: Job | None = None
    phase: JobPhase = field(default_factory=JobPhase)
    every: tuple[RunPlan, ...] = ()

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.job.workers

    @property
    def node_names(self) -> list[str]:
        """The names of all nodes, of all phases, in the order in which they are started."""
        return self._nodes(self.most_servers, self.most_workers)

    @property
    def own_nodes(self) -> list[str]:
        """The names of the nodes that take part: in this phase, if the run has phases."""
        return self._nodes(self.servers, self.workers)

    def _nodes(self, servers: int, workers: int) -> list[str]:
        replicas = [member_name(part, rank) for rank in range(workers) for part in range(self.parts)]
        return [COORDINATOR, *map(shard_name, range(servers)), *replicas]

    @property
    def most_workers(self) -> int:
        """Greatest number of workers of any phase."""
        return max((plan.workers for plan in self.every), default=self.workers)

    @property
    def most_servers(self) -> int:
        """Greatest number of shards of any phase."""
        return max((plan.servers for plan in self.every), default=self.servers)

    @property
    def parts(self) -> int:
        """Number of processes of each worker's replica."""
        return self.job.split

    @property
    def predictors(self) -> str:
        """Names the predictors of independently trained parts; "" if there are none."""
        pipeline = self.job.pipeline
        return pipeline.of_parts(self.parts) if isinstance(pipeline, SyntheticGradients) else ""

    @property
    def fetch_codec(self) -> Codec | None:
        """Encodes parameters that workers fetch for gradients; None sends them as they are."""
        return None if self.job.fetch_codec is None else of_parameters(self.job.fetch_codec)

    @property
    def remainders(self) -> str:
        """Names the unsent state that each worker keeps: by which codec, or while it computes; "" if none."""
        keeps = isinstance(self.codec, PowerSGD) or (self.codec is not None and bool(self.codec.state_names))
        delayed = isinstance(self.strategy, GroupStrategy) and self.strategy.delay > 0
        if not (keeps or delayed):
            return ""
        who = f"{type(self.strategy).__name__}{' with delay' if delayed else ''}"
        return f"{self.codec if keeps else 'no codec'} of {who}, {self.parts} parts"

    @property
    def rule_name(self) -> str:
        """Names the state that a checkpoint of the run has: of which update rule, and of which batch method.

        An outer rule keeps other state than the same rule for gradients, and a rule without momentum keeps none.
        """
        rule = self.shards_optimizer
        name = describe(rule.rule if isinstance(rule, Outer) else rule)["class"] or type(rule).__qualname__
        if isinstance(rule, PassSum):
            return (
                f"{name} of {self.strategy.title or type(self.strategy).__name__} ({', '.join(rule.vectors)})"
            )
        return f"{'outer ' * isinstance(rule, Outer)}{name} ({', '.join(rule.state_names)})"

    @property
    def restores_state(self) -> bool:
        """Whether the optimizer state of the checkpoint is that of the run's rule.

        A phase may have another rule, and so may a resumed job.
        A batch method starts over in each phase: the phase before may have ended, or had other options.
        """
        resume = self.resume
        if resume is None:
            return True
        begins = self.whole is not None and self.phase.number != resume.phase.number
        return resume.rule == self.rule_name and not (self.strategy.in_passes and begins)

    @property
    def renumbered(self) -> int | None:
        """The version of all chunks of the checkpoint, if rounds follow another strategy; else None.

        Versions of rounds are the numbers of the rounds, and those of another strategy count pushes.
        """
        resume = self.resume
        if resume is None or self.whole is None or self.strategy.partitioning != "rounds":
            return None
        return None if resume.strategy == name_of(self.strategy) else resume.rounds

    @property
    def vectors(self) -> Resume | None:
        """The checkpoint whose vectors the exchange goes on from; None if it begins anew.

        Rounds of a loop's gradients always do, and so does what follows them: their checkpoint has no vectors.
        """
        resume = self.resume
        if resume is None or self.averages_gradients or self.follows_gradients:
            return None
        return resume

    @property
    def follows_gradients(self) -> bool:
        """Whether the checkpoint is of users' own loops that have exchanged gradients alone, and this plan's do not."""
        resume = self.resume
        return self.open_ended and resume is not None and resume.strategy != name_of(self.strategy)

    @property
    def replicas(self) -> str:
        """Names what a checkpoint has of each worker that has its own parameters; "" if there are none."""
        if not isinstance(self.strategy, PeerStrategy):
            return ""
        return f"{type(self.strategy).__name__} with {type(self.optimizer).__name__}"

    @property
    def servers_of_part(self) -> int:
        """Number of shards that hold each part of the model; all of them if it is not split."""
        return self.servers // self.parts

    def identity(self, name: str, incarnation: int) -> Identity:
        """The identity of a node before it has joined."""
        return Identity(self.id, name, incarnation, nodes=len(self.node_names))

    @property
    def follows(self) -> bool:
        """Whether another phase of the job follows this one."""
        return self.whole is not None and self.phase.number + 1 < len(self.whole.phases)

    @property
    def variance_test(self) -> VarianceTest | None:
        """Makes the batches of this phase grow; None if nothing does."""
        if self.whole is None or (theta := (phase := self.whole.phases[self.phase.number]).theta) is None:
            return None
        population = self.job.data.num_samples or math.inf
        return VarianceTest(theta, self.workers, self.job.accumulate, phase.largest, population)

    @property
    def link_choice(self) -> LinkChoice | None:
        """Chooses, in this phase, how the next phase exchanges; None if the job says that."""
        number = self.phase.number + 1
        if self.whole is None or not self.follows or self.whole.phases[number].strategy != AUTO:
            return None
        phase, samples = self.whole.phases[number], self.job.data.num_samples
        workers = phase.workers or self.whole.workers
        sizes = phase.batch_size or self.whole.batch_size
        joined = sizes * workers if isinstance(sizes, int) else sum(sizes)
        measures = self.whole.phases[number - 1] == MEASURES
        epoch = -(-samples // joined) if samples else None
        return LinkChoice(
            workers,
            self._joined,
            epoch,
            only_measures=measures and not self.open_ended,  # a loop ends its phase itself
            balanced=self.balanced or self.open_ended,  # loops have no shares
            delays=not self.open_ended,
        )

    @property
    def looks_first(self) -> bool:
        """Whether workers look at their links before the first minibatch: see `worker.group.exchange.FirstLook`."""
        whole = self.whole
        return (
            self.link_choice is not None and whole is not None and whole.phases[self.phase.number] == MEASURES
        )

    @property
    def loop_steps(self) -> int | None:
        """The step of the users' own loops with which this phase is over; None if it lasts as long as the loops."""
        if not (self.open_ended and self.follows) or self.whole is None:
            return None
        return sum(phase.steps or 0 for phase in self.whole.phases[: self.phase.number + 1])

    @property
    def phase_until(self) -> Until | None:
        """What ends this phase before its epochs or steps do."""
        return None if self.whole is None else self.whole.phases[self.phase.number].until

    def of_model(self, model: Model) -> RunPlan:
        """The same plan with another instance of the model."""
        whole = None if self.whole is None else replace(self.whole, model=model)
        return replace(self, job=replace(self.job, model=model), whole=whole)

    @property
    def acknowledge(self) -> Literal["applied", "logged", "replicated"]:
        """When shards acknowledge a push: see `Job.acknowledge`."""
        return self.job.acknowledge or "applied"

    @property
    def traits(self) -> dict[str, str]:
        """What the job has and asks for; see `gradstream.traits`."""
        return traits_of(self.job, self.strategy, self.optimizer, self.codec)

    # ---- data ---------------------------------------------------------------------------

    @property
    def open_ended(self) -> bool:
        """Whether the user's own training loops bring the data, of an unknown amount."""
        return is_open_ended(self.job)

    @property
    def steps_left(self) -> int | None:
        """Steps of each worker from here on, if their number ends the run."""
        steps = self.job.steps
        return steps if steps is None or self.resume is None else max(0, steps - self.resume.rounds)

    @property
    def balanced(self) -> bool:
        """Whether the sizes of minibatches follow the measured speed of the workers."""
        return self.job.shares == MEASURED

    def ledger(self) -> Ledger | OpenLedger:
        """A new account of every minibatch of the run."""
        if self.open_ended:
            served, in_rounds = self.served, self.strategy.partitioning == "rounds"
            told_by: Literal["shards", "workers", ""] = ""
            if served is not None and not served.rule(self.workers, "mean").by_round:
                told_by = "shards"
            elif isinstance(self.strategy, PeerStrategy):
                told_by = "workers"
            ledger = OpenLedger(
                self.workers,
                rounds=in_rounds,
                first=int(self.averages_gradients),
                deals=not isinstance(self.strategy, GroupStrategy),
                told_by=told_by,
            )
            if self.resume is not None and self.resume.dealt:
                ledger.dealing.load(json.loads(self.resume.dealt))
            return ledger
        helping = self.strategy.partitioning_of_run() != "partitions"  # with what is left of an epoch
        return Ledger(
            self.batch_plan(),
            epochs=self.job.epochs,
            steps=self.steps_left,
            helping=helping,
            in_passes=self.served is not None and self.served.in_passes,
        )

    def batch_plan(self) -> BatchPlan:
        """Which worker goes through which samples. Raises ConfigError if the numbers do not fit."""
        job = self.job
        spec = PartitionSpec(
            partitioning=self._partitioning,
            batch_size=job.batch_size,
            workers=job.workers,
            seed=job.seed,
            shares=job.shares,
            epochs=job.epochs,
            steps=job.steps and job.steps * self._joined,
            progress=self.resume.done if self.resume is not None else DataProgress(),
        )
        plan = plan_of(job.data, spec)
        if job.assignment == "queue" and not isinstance(plan, QueuePlan):
            raise ConfigError(
                f"assignment='queue': the data {job.data.name!r} is a stream, has a loader with num_workers, or "
                f"brings its own plan ({plan!r}), so each worker needs its own partition; leave assignment out: "
                "fast workers then help slow ones at the end of their partitions"
            )
        joined = plan if self._joined == 1 else JoinedPlan(plan, self._joined)
        if self.balanced:
            self._check_balanced(plan, joined)
        return joined

    @property
    def has_queue(self) -> bool:
        """Whether the workers of a job take their minibatches from one queue, however many they are."""
        data = self.job.data
        reads_ahead = (
            data.loader.num_workers > 0 if isinstance(data, LoaderDataset) else hasattr(data, "plan")
        )
        return not self.open_ended and self._partitioning == "queue" and not reads_ahead

    @property
    def _joined(self) -> int:
        """Number of minibatches of a worker in a step."""
        return self.job.accumulate * self.strategy.local_steps

    @property
    def _partitioning(self) -> Partitioning:
        """How the data is divided: as the strategy says or, if it leaves a choice, as the job says."""
        own = self.strategy.partitioning_of_run()
        if own == "rounds":
            return own
        return self.job.assignment or ("queue" if self.balanced else own)

    def _check_balanced(self, plan: BatchPlan, joined: BatchPlan) -> None:
        """Raises ConfigError unless rounds can be divided anew; a resumed run keeps the shares it had."""
        if isinstance(plan, QueuePlan):
            return
        if not isinstance(plan, RoundPlan):
            raise ConfigError(
                f"shares='measured': the data {self.job.data.name!r} brings its own plan, {plan!r}, so gradstream "
                "cannot divide its rounds by the workers' speeds; leave out shares"
            )
        before = self.resume.shares if self.resume is not None else ()
        if len(before) == plan.num_partitions and sum(before) == sum(plan.shares):
            plan.reassign(0, 0, before)

    # ---- update rules -------------------------------------------------------------------

    @property
    def averages_gradients(self) -> bool:
        """Whether only gradients are exchanged: the user's own loops make each step, on every worker."""
        return (
            self.open_ended and self.strategy.gives_mean and cast(OwnData, self.job.data).averages_gradients
        )

    @property
    def optimizer_in_loop(self) -> bool:
        """Whether the optimizers of the user's own loops make the steps; the run need not know their rule."""
        return self.open_ended and (self.averages_gradients or self.strategy.local_rounds)

    @property
    def trains_locally(self) -> bool:
        """Whether workers make steps of their own between two exchanges, with or without servers."""
        pushes = "gradients" if self.served is None else self.served.pushes
        return self.strategy.local_rounds or pushes != "gradients"

    @property
    def workers_optimize(self) -> bool:
        """Whether the workers apply the run's update rule, each to its own parameters."""
        served = self.served
        return isinstance(self.strategy, GroupStrategy | PeerStrategy) or (
            served is not None and served.pushes != "gradients"
        )

    @property
    def served(self) -> ServerStrategy | None:
        """The strategy, if its workers exchange through servers; else None."""
        return self.strategy if isinstance(self.strategy, ServerStrategy) else None

    @property
    def shards_optimizer(self) -> Optimizer:
        """The rule for a weighted sum of what workers send, on shards or in a group: the run's, or an outer rule."""
        if self.averages_gradients or isinstance(self.strategy, PeerStrategy):
            return Replace()
        if isinstance(self.strategy, GroupStrategy) and (outer := self.strategy.outer_rule()) is not None:
            return Outer(outer)
        if self.served is None or self.served.pushes == "gradients":
            return self.optimizer
        return Outer(self.served.outer_optimizer(self.optimizer))

    @property
    def by_name(self) -> bool:
        """Whether the update rule needs the names of parameters: for settings of some, or for shapes."""
        return bool(self.groups) or isinstance(self.optimizer, ByShape)

    def grouped(self, model: Model) -> GroupedRule | None:
        """The update rule of a model, if it is not the same for all elements; else None.

        Args:
            model: gives the names of its parameters; it is not touched unless `by_name`.

        Raises:
            UnknownNameError: a group matches none of them.
            ConfigError: the rule needs whole tensors, but workers that have only slices of some apply it.
        """
        if not self.by_name:
            return None
        if self.workers_optimize and (sliced := _divided(model)):
            refuse({**self.traits, "sliced tensors": f"split={self.parts}, which divides {sliced!r}"})
        tensors = [(slot.name, slot.start, slot.stop) for slot in model.layout.slots]
        shapes = {slot.name: slot.shape for slot in whole_layout_of(model).slots}
        return GroupedRule(self.optimizer, self.groups, tensors, list(shapes), shapes)

    # ---- chunks -------------------------------------------------------------------------

    def chunk_elems_of(self, layout: Layout) -> int:
        """Elements per chunk for a model's layout: the same on all nodes, since all have the same model.

        The size is fixed for a strategy that exchanges blocks of elements which depend on the borders of chunks.
        """
        served = [
            plan.served for plan in self.every or [self]
        ]  # shards, and their chunks, last for all phases
        fewest = max((strategy.fewest_chunks for strategy in served if strategy is not None), default=1)
        most = parted_chunk_elems(layout.elems, fewest) if fewest > 1 else MAX_CHUNK_ELEMS
        if self.chunk_elems is not None:
            return min(most, self.chunk_elems)
        if self.served is not None and self.served.rows(bool(layout.tables)) is not None:
            return CHUNK_ELEMS
        return min(
            most, shared_chunk_elems(layout.elems, layout.dtype.itemsize, max(1, self.servers_of_part))
        )


def _divided(model: Model) -> str:
    """Name of a parameter of which a part of a split model has only a slice; "" if there is none."""
    if not isinstance(model, PartModel):
        return ""
    pieces = (piece for stage in model.plan.pieces for piece in stage)
    return next((piece.name for piece in pieces if piece.axis is not None), "")
