"""The nodes of a run, put together: the same for processes on machines and for a simulation.

A `RunPlan` is what all nodes of a run agree on. It makes each role out of a runtime and an endpoint;
whether those are real or virtual is for `cluster/` and `simulate/` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, cast

from gradstream.checkpoint.manifest import Manifest, Resume
from gradstream.checkpoint.policy import Policy
from gradstream.collectives.buckets import Buckets
from gradstream.collectives.factory import form_group
from gradstream.coordinator.assignment import BatchAssignment
from gradstream.coordinator.balance import ShareBalance
from gradstream.coordinator.checkpoint_writer import CheckpointOptions
from gradstream.coordinator.client.member import Member
from gradstream.coordinator.coordinator import Coordinator
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.participation import ParticipationSchedule
from gradstream.coordinator.snapshot import SnapshotLimits
from gradstream.coordinator.stopping import StoppingCriterion, Until
from gradstream.data.base import BatchPlan, Dataset, Partitioning, PartitionSpec
from gradstream.data.done import DataProgress
from gradstream.data.feed import plan_of
from gradstream.data.joined import JoinedPlan
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.data.plan import RoundPlan
from gradstream.data.queue_plan import QueuePlan
from gradstream.data.shares import MEASURED
from gradstream.errors import ConfigError
from gradstream.model.base import Layout, Model, Reduction
from gradstream.optim.base import Optimizer
from gradstream.optim.groups import GroupedRule, ParameterGroup
from gradstream.optim.merge import Outer, Replace
from gradstream.recording import FOLDER, Log, origin_of
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.server.chunks import CHUNK_ELEMS, ChunkMap, shared_chunk_elems
from gradstream.server.shard.config import FindOptimizer, ShardConfig
from gradstream.server.shard.node import ShardNode
from gradstream.server.shard.recorder import ShardRecorder
from gradstream.strategies.base import Strategy
from gradstream.telemetry.events import StartedEvent
from gradstream.transport.base import Endpoint, Identity
from gradstream.wire import v1
from gradstream.wire.dtypes import itemsize_bytes
from gradstream.worker.config import WorkerConfig
from gradstream.worker.evaluation import EvaluationPlan
from gradstream.worker.gradient import Clip
from gradstream.worker.node import WorkerNode
from gradstream.worker.replica.loop import OwnData
from gradstream.worker.replica.updater import UpdateRule

__all__ = ["COORDINATOR", "RunPlan", "shard_name", "worker_name"]

COORDINATOR = "coordinator"


def shard_name(rank: int) -> str:
    """Node name of a shard."""
    return f"shard-{rank}"


def worker_name(rank: int) -> str:
    """Node name of a worker."""
    return f"worker-{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What all nodes of a run agree on.

    Args:
        job: job id.
        software: version of gradstream.
        strategy, optimizer: how to distribute, and how to update.
        workers, servers: how many of each.
        batch_size, shares, assignment: how data is divided; see `data.plan` and `data.queue_plan`.
        groups: parameters with settings of their own.
        accumulate: so many minibatches of that size are joined in a step.
        clip: bounds of each worker's gradient.
        evaluation: when held-out samples are looked at.
        until: what ends the run early.
        epochs, steps: when the run ends.
        seed: of initial parameters, order of samples and dropout.
        chunk_elems: elements per chunk; None leaves it to the size of the model: all nodes share memory.
        data: the data set, which says how it can be divided.
        num_parameters: of the model.
        reduction: whether the model's gradients are means or sums.
        policy: when checkpoints are made; None makes none, and keeps nothing when the run is stopped.
        resume: where the run goes on; None where it begins.
        deadlines: see `Deadlines`.
        open_ended: the workers bring data of their own, nobody knows how much.
        find_optimizer: makes the update rule of what workers say of it, where they bring it.
        record: nodes note in which order things happen, so that the run can be replayed.
        allow_lost: see `Job`.
    """

    job: str
    software: str
    strategy: Strategy
    optimizer: Optimizer
    workers: int
    servers: int
    batch_size: int | Sequence[int]
    shares: Sequence[float] | Literal["measured"] | None
    epochs: int | None
    steps: int | None
    seed: int
    chunk_elems: int | None
    data: Dataset
    num_parameters: int
    reduction: Reduction
    assignment: Literal["queue", "partitions"] | None = None
    groups: tuple[ParameterGroup, ...] = ()
    accumulate: int = 1
    clip: Clip = field(default_factory=Clip)
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    until: Until | None = None
    policy: Policy | None = None
    resume: Resume | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    open_ended: bool = False
    find_optimizer: FindOptimizer | None = None
    record: bool = False
    allow_lost: bool = False

    @property
    def steps_left(self) -> int | None:
        """Minibatches of each worker from here on, where their number ends the run."""
        if self.steps is None or self.resume is None:
            return self.steps
        return max(0, self.steps - self.resume.rounds)

    @property
    def node_names(self) -> list[str]:
        """Every node, in the order in which they are best started."""
        shards = [shard_name(rank) for rank in range(self.servers)]
        return [COORDINATOR, *shards, *(worker_name(rank) for rank in range(self.workers))]

    def plan(self) -> BatchPlan:
        """Who goes through which sample. Raises ConfigError where the numbers do not fit."""
        division = PartitionSpec(
            partitioning=self._partitioning,
            batch_size=self.batch_size,
            workers=self.workers,
            seed=self.seed,
            shares=self.shares,
            epochs=self.epochs,
            steps=self.steps and self.steps * self.accumulate,
            progress=self.resume.done if self.resume is not None else DataProgress(),
        )
        plan = plan_of(self.data, division)
        if self.assignment == "queue" and not isinstance(plan, QueuePlan):
            raise ConfigError(
                f"assignment='queue': the data {self.data.name!r} is a stream, is read ahead, or brings its "
                f"own plan ({plan!r}), so each worker needs a part of its own; leave assignment out: others "
                "take what is left of a part at its end"
            )
        joined = plan if self.accumulate == 1 else JoinedPlan(plan, self.accumulate)
        if self.balanced:
            self._check_balanced(plan, joined)
        return joined

    @property
    def _partitioning(self) -> Partitioning:
        """How the data is divided: by what the strategy says, and where there is a choice by the job."""
        own = self.strategy.partitioning_of_run()
        if own == "rounds":
            return own
        return self.assignment or ("queue" if self.balanced else own)

    @property
    def _helping(self) -> bool:
        """Whether workers that are done with their partition of an epoch help the others with theirs."""
        return self.strategy.partitioning_of_run() != "partitions"

    @property
    def balanced(self) -> bool:
        """Whether sizes follow the measured speed of the workers."""
        return self.shares == MEASURED

    def _check_balanced(self, plan: BatchPlan, joined: BatchPlan) -> None:
        """Raises unless a round can be divided anew; a resumed run goes on with the shares it had."""
        if isinstance(plan, QueuePlan):
            return
        if not isinstance(plan, RoundPlan):
            raise ConfigError(
                f"shares='measured': the data {self.data.name!r} brings its own plan, {plan!r}, whose rounds "
                "cannot be divided anew; leave out shares"
            )
        before = self.resume.shares if self.resume is not None else ()
        if len(before) == plan.num_partitions and sum(before) == sum(plan.shares):
            plan.reassign(0, 0, before)

    def ledger(self) -> Ledger | OpenLedger:
        """An account of every minibatch of the run."""
        if self.open_ended:
            return OpenLedger(self.workers, rounds=self.strategy.partitioning == "rounds")
        return Ledger(self.plan(), epochs=self.epochs, steps=self.steps_left, helping=self._helping)

    def identity(self, name: str, incarnation: int) -> Identity:
        """Who a node is, before it has joined."""
        return Identity(self.job, name, incarnation, nodes=1 + self.servers + self.workers)

    def coordinator(
        self, runtime: Runtime, endpoint: Endpoint, on_events: Callable[[bytes], None]
    ) -> Coordinator:
        """The coordinator; `on_events` gets every event of the run as JSON lines."""
        ledger = self.ledger()
        driven = self.strategy.drives()
        rounds, earlier = (
            self.strategy.partitioning == "rounds",
            self.resume.step if self.resume is not None else 0,
        )
        started = StartedEvent(
            job=self.job,
            workers=self.workers,
            servers=self.servers,
            strategy=type(self.strategy).__name__.lower(),
            optimizer=type(self.optimizer).__name__.lower(),
            num_parameters=self.num_parameters,
            num_samples=self.data.num_samples,
            in_rounds=rounds,
            total_steps=self._total_steps(ledger, earlier),
        )
        membership = Membership(
            started,
            ledger,
            survives_worker_loss=self.strategy.survives_worker_loss,
            software=self.software,
            policy=self.policy,
            together=rounds,
            resume=self.resume,
            limits=SnapshotLimits(hold_s=self.deadlines.cut_s),
            quorum=self.strategy.quorum(self.workers),
            balance=ShareBalance(ledger.plan)
            if rounds and self.balanced and isinstance(ledger, Ledger)
            else None,
            assignment=None
            if rounds or isinstance(ledger, OpenLedger)
            else BatchAssignment(ledger, self.workers, 2 * self.deadlines.lease_s),
            participation=ParticipationSchedule(ledger, self.workers)
            if driven and isinstance(ledger, Ledger)
            else None,
            allow_lost=self.allow_lost,
        )
        return Coordinator(
            runtime,
            endpoint,
            membership,
            on_events=on_events,
            deadlines=self.deadlines,
            checkpoints=None if self.policy is None else self._keeping(started, self.policy),
            earlier_s=self._earlier_s,
            criterion=None if self.until is None else StoppingCriterion(self.until),
            drive=self.strategy.drive if driven else None,
            num_samples=self.data.num_samples,
        )

    def _total_steps(self, ledger: Ledger | OpenLedger, earlier: int) -> int:
        """Minibatches over all workers, or rounds; 0 where nobody knows."""
        if isinstance(ledger, OpenLedger):
            return 0
        return earlier + ledger.num_planned // (self.workers if self.strategy.partitioning == "rounds" else 1)

    def _keeping(self, started: StartedEvent, policy: Policy) -> CheckpointOptions:
        template = Manifest(
            step=0,
            rounds=0,
            steps={},
            done=DataProgress(),
            versions=(),
            model={},
            optimizer=started.optimizer,
            strategy=started.strategy,
            seed=self.seed,
            workers=self.workers,
            servers=self.servers,
            num_samples=started.num_samples,
            software=self.software,
        )
        return CheckpointOptions(
            template=template,
            states=self._states,
            open_ended=self.open_ended,
            policy=policy,
            resume=self.resume,
            silence_s=self.deadlines.silence_s,
            pieces=self._pieces,
            joint=self._joint,
        )

    def _states(self, model: v1.ModelSpec) -> Sequence[str]:
        """Names of the state vectors on the shards, by the rule that the workers bring, or by the job's."""
        if model.optimizer and self.find_optimizer is not None and not self._joint:
            return self.find_optimizer(model.optimizer)[0].state_names
        return self.shards_optimizer.state_names

    def _pieces(self, model: v1.ModelSpec, holders: int) -> list[Sequence[tuple[int, int]]]:
        """What each of so many nodes holds of every vector of a model."""
        if self.strategy.through == "group":
            bucket_elems = self.strategy.bucket_elems(itemsize_bytes(model.dtype), model.chunk_elems)
            buckets = Buckets(model.elems, bucket_elems, holders)
            return [buckets.owned(rank) for rank in range(holders)]
        chunks = ChunkMap(model.elems, model.chunk_elems, holders)
        return [[chunks.bounds(chunk) for chunk in chunks.chunks_of(rank)] for rank in range(holders)]

    @property
    def _earlier_s(self) -> float:
        return self.resume.time_s if self.resume is not None else 0.0

    @property
    def _workers_optimize(self) -> bool:
        """Whether the run's update rule is carried out by the workers, each on parameters of its own."""
        return self.strategy.through == "group" or self.strategy.pushes != "gradients"

    @property
    def _joint(self) -> bool:
        """Whether gradients alone are exchanged: loops of the user's own make each step, on every worker."""
        return self.open_ended and self.strategy.gives_mean and cast(OwnData, self.data).joint

    @property
    def shards_optimizer(self) -> Optimizer:
        """What shards do with a weighted sum of pushes: the run's own rule, or the strategy's outer one."""
        if self._joint:
            return Replace()
        if self.strategy.pushes == "gradients":
            return self.optimizer
        return Outer(self.strategy.outer_optimizer(self.optimizer))

    def grouped(self, model: Model) -> GroupedRule | None:
        """The update rule of a model some of whose parameters have settings of their own; else None.

        Args:
            model: looked at only where there are groups, for the names of its parameters.

        Raises:
            UnknownNameError: a group matches none of them.
        """
        if not self.groups:
            return None
        tensors = [(slot.name, slot.start, slot.stop) for slot in model.layout.slots]
        return GroupedRule(self.optimizer, self.groups, tensors)

    def chunk_elems_of(self, layout: Layout) -> int:
        """Elements per chunk, by the model's layout: the same on all nodes, since all have the same model.

        Which blocks of elements a strategy exchanges may depend on where chunks begin: those do not change.
        """
        if self.chunk_elems is not None:
            return self.chunk_elems
        if self.strategy.rows(bool(layout.tables)) is not None:
            return CHUNK_ELEMS
        return shared_chunk_elems(layout.elems, layout.dtype.itemsize, max(1, self.servers))

    def shard(self, runtime: Runtime, endpoint: Endpoint, rank: int, model: Model) -> ShardNode:
        """One shard of the parameter server; its endpoint has started and knows the coordinator.

        Args:
            model: see `grouped`.
        """
        config = self.shard_config(rank, model)
        if self.record:
            config = replace(config, order=ShardRecorder(self._log(runtime)))
        return ShardNode(runtime, endpoint, self._member(runtime, endpoint, "shard", rank), config)

    def shard_config(self, rank: int, model: Model) -> ShardConfig:
        """What a shard is told; see `shard`."""
        return ShardConfig(
            rank=rank,
            num_shards=self.servers,
            rule=self.strategy.rule(self.workers, self.reduction),
            optimizer=self.shards_optimizer,
            grouped=None if self._workers_optimize else self.grouped(model),
            decayed=self.strategy.decays_gradients,
            silence_s=self.deadlines.silence_s,
            find_optimizer=(lambda _: (Replace(), None)) if self._joint else self.find_optimizer,
            resume_from=self.resume.folder if self.resume is not None and not self._joint else "",
            quorum=self.strategy.quorum(self.workers),
            correction=self.strategy.correction(),
            workers=self.workers,
        )

    def worker(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        rank: int,
        model: Model,
        data: Dataset | OwnData,
    ) -> WorkerNode:
        """One worker, with its own instance of the model; its endpoint knows the coordinator."""
        config = self.worker_config(rank, model, data)
        if self.record:
            config = replace(config, log=self._log(runtime))
        return WorkerNode(runtime, endpoint, self._member(runtime, endpoint, "worker", rank), config)

    def worker_config(self, rank: int, model: Model, data: Dataset | OwnData) -> WorkerConfig:
        """What a worker is told; see `worker`."""
        own = cast(OwnData, data) if self.open_ended else None
        rule = self._update_rule(model, own)
        return WorkerConfig(
            rank=rank,
            num_workers=self.workers,
            strategy=self.strategy,
            model=model,
            data=cast(Dataset, data),
            plan=None if self.open_ended else self.plan(),
            lr=self.optimizer.lr,
            clip=self.clip,
            evaluation=self.evaluation,
            seed=self.seed,
            chunk_elems_of=self.chunk_elems_of,
            epochs=self.epochs,
            steps=self.steps_left,
            num_steps=self.steps,
            silence_s=self.deadlines.silence_s,
            retry_s=self.deadlines.retry_s,
            loop=own.loop(rank) if own else None,
            optimizer=own.optimizer if own and self.strategy.pushes == "gradients" else "",
            resume=self.resume,
            joint=self._joint,
            balanced=self.balanced,
            form_group=partial(form_group, how=self._how_grouped, silence_s=self.deadlines.silence_s),
            update_rule=rule if self._workers_optimize else None,
            shards_rule=None if self._workers_optimize else rule,
        )

    def _log(self, runtime: Runtime) -> Log:
        """Where a node notes what is needed to repeat it."""
        path = f"{FOLDER}/{self.job}/{runtime.node}.rec"
        resume = None if self.resume is None else self.resume.as_json()
        return Log(runtime.storage, path, {**origin_of(runtime.node, self.job), "resume": resume})

    @property
    def _how_grouped(self) -> str:
        """The kind of group that the strategy asks for."""
        strategy = self.strategy
        return strategy.algorithm if strategy.exchange == "auto" else strategy.exchange

    def _update_rule(self, model: Model, own: OwnData | None) -> UpdateRule:
        """What parameters are updated by, those of a worker or those of the shards."""
        if self._joint:
            return Replace(), None
        if own is not None and own.optimizer and self.find_optimizer is not None:
            return self.find_optimizer(own.optimizer)
        return self.optimizer, self.grouped(model)

    def _member(self, runtime: Runtime, endpoint: Endpoint, role: str, rank: int) -> Member:
        identity = endpoint.identity
        node = v1.Node(
            name=identity.name,
            role=role,
            rank=rank,
            address=endpoint.address,
            incarnation=identity.incarnation,
        )
        return Member(
            runtime,
            endpoint,
            node,
            software=self.software,
            deadlines=self.deadlines,
            earlier_s=self._earlier_s,
        )
