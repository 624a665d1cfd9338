"""Builds the coordinator and the workers of a run: each from the plan of the run, a runtime and an endpoint.

The caller, `run.node` or `run.simulated`, decides whether runtime and endpoint are real or virtual. Shards are
built in `run.shard`, which a run without servers does not import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from gradstream._version import __version__
from gradstream.checkpoint.elsewhere import ElsewhereStorage
from gradstream.checkpoint.folder import Policy
from gradstream.checkpoint.manifest import Manifest
from gradstream.checkpoint.snapshot import Carried
from gradstream.collectives.factory import form_group
from gradstream.collectives.group import Buckets, slice_of
from gradstream.coordinator.assignment import BatchAssignment, ShareBalance
from gradstream.coordinator.checkpoint_writer import CheckpointOptions
from gradstream.coordinator.client.member import Member
from gradstream.coordinator.coordinator import Coordinator
from gradstream.coordinator.durable import Keeper
from gradstream.coordinator.lifecycle import Boundary
from gradstream.coordinator.link_choice import Chosen
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.registry import CoordinatorPlan
from gradstream.coordinator.relay import RunClock
from gradstream.data.base import DataProgress
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.errors import ConfigError
from gradstream.job.job import Job, build_model
from gradstream.job.losses import losses_of
from gradstream.job.overrides import optimizer_of_text
from gradstream.job.plan import RunPlan
from gradstream.job.registry import name_of
from gradstream.model.base import Model
from gradstream.model.torch_module import TorchModel
from gradstream.optim.groups import GroupedRule
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.schedule import STREAMING, check_streaming, make_schedule
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.recording import FOLDER, Log, origin_of
from gradstream.runtime.base import Runtime
from gradstream.split.hybrid_model import HybridModel
from gradstream.split.part_model import PartModel
from gradstream.strategies.base import GroupStrategy, PeerStrategy
from gradstream.telemetry.events import PhaseEvent, StartedEvent
from gradstream.transport.base import Endpoint
from gradstream.untrusted import say
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap, part_map_of, part_of, role_of_part
from gradstream.wire.frames import itemsize_bytes
from gradstream.worker.config import WorkerConfig
from gradstream.worker.node import WorkerNode
from gradstream.worker.parts.channel import check_encodable
from gradstream.worker.parts.node import PartNode

# ---- coordinator ------------------------------------------------------------------------


def build_coordinator(
    plan: RunPlan,
    runtime: Runtime,
    endpoint: Endpoint,
    keeper: Keeper,
    *,
    spread: bool = False,
    boundary: Boundary | None = None,
) -> Coordinator:
    """Builds the coordinator of a run.

    Args:
        runtime, endpoint: of this node.
        keeper: gets every event of the run, as JSON lines.
        spread: whether nodes may be on several machines.
        boundary: the one after which the plan begins; None in a process that begins with it.
    """
    ledger = plan.ledger()
    if plan.resume is not None and plan.whole is None and not plan.restores_state:
        say(
            f"the state of the update rule begins anew: {plan.resume.folder} has that of {plan.resume.rule}, and the "
            f"run goes on with {plan.rule_name}"
        )
    started = _started(plan, ledger)
    boundary = boundary or Boundary(plan.phase.boundary)
    membership = _membership(plan, ledger, started, boundary, spread=spread)
    return Coordinator(
        runtime,
        endpoint,
        membership,
        keeper=keeper,
        checkpoints=None if plan.policy is None else _checkpoint_options(plan, started, plan.policy),
    )


def _started(plan: RunPlan, ledger: Ledger | OpenLedger) -> StartedEvent:
    in_rounds = plan.strategy.partitioning == "rounds"
    total_steps = 0  # unknown
    if isinstance(ledger, Ledger):
        earlier = plan.resume.step if plan.resume is not None else 0
        total_steps = earlier + ledger.num_planned // (plan.workers if in_rounds else 1)
    return StartedEvent(
        job=plan.id,
        workers=plan.workers,
        servers=plan.servers,
        strategy=name_of(plan.strategy),
        optimizer=name_of(plan.optimizer),
        num_parameters=0,  # the first worker registers the model
        num_samples=plan.job.data.num_samples,
        in_rounds=in_rounds,
        total_steps=total_steps,
        way=plan.strategy.topology,
        trains_locally=plan.trains_locally,
    )


def _membership(
    plan: RunPlan,
    ledger: Ledger | OpenLedger,
    started: StartedEvent,
    boundary: Boundary,
    *,
    spread: bool = False,
) -> Membership:
    deadlines = plan.job.deadlines
    balance = assignment = None
    if isinstance(ledger, Ledger):
        if started.in_rounds and plan.balanced:
            balance = ShareBalance(ledger.plan)
        if not started.in_rounds:
            assignment = BatchAssignment(
                ledger, plan.workers, 2 * deadlines.lease_s, copies=plan.served is None or plan.served.copies
            )
    return Membership(
        CoordinatorPlan(
            started=started,
            ledger=ledger,
            losses=losses_of(plan, spread=spread),
            balance=balance,
            assignment=assignment,
            policy=plan.policy,
            deadlines=deadlines,
            resume=plan.resume,
            parts=plan.parts,
            until=plan.job.until,
            until_here=plan.phase_until,
            boundary=boundary,
            present=plan.phase,
            successor=replace(plan.phase, over=True, chosen="") if plan.follows else None,
            opening=None if plan.whole is None else _announced(plan, plan.whole, started),
            variance_test=plan.variance_test,
            link_choice=plan.link_choice,
        )
    )


def _announced(plan: RunPlan, whole: Job, started: StartedEvent) -> PhaseEvent:
    """The event that announces a phase of the job."""
    job, number = plan.job, plan.phase.number
    sizes = [job.batch_size] * plan.workers if isinstance(job.batch_size, int) else list(job.batch_size)
    return PhaseEvent(
        number=number + 1,
        phases=len(whole.phases),
        label=whole.phases[number].name or started.strategy,
        workers=started.workers,
        servers=started.servers,
        strategy=started.strategy,
        optimizer=started.optimizer,
        batch_size=[] if plan.open_ended else sizes,
        accumulate=job.accumulate,
        total_steps=started.total_steps,
        in_rounds=started.in_rounds,
        way=started.way,
        trains_locally=started.trains_locally,
        why=Chosen.of_json(plan.phase.chosen).why,
    )


def _checkpoint_options(plan: RunPlan, started: StartedEvent, policy: Policy) -> CheckpointOptions:
    template = Manifest(
        step=0,
        rounds=0,
        steps={},
        done=DataProgress(),
        versions=(),
        model={},
        optimizer=started.optimizer,
        strategy=started.strategy,
        seed=plan.job.seed,
        workers=plan.workers,
        servers=plan.servers_of_part,
        num_samples=started.num_samples,
        software=__version__,
        rule=plan.rule_name,
        phase=plan.phase,
        predictors=plan.predictors,
        remainders=plan.remainders,
        replicas=plan.replicas,
    )
    return CheckpointOptions(
        template=template,
        states=partial(_states, plan),
        policy=policy,
        pieces=partial(_pieces, plan),
        averages_gradients=plan.averages_gradients,
    )


def _states(plan: RunPlan, model: v1.ModelSpec) -> Sequence[str]:
    """Names of the state vectors on the shards, by the rule that the workers bring, or by the job's."""
    if model.optimizer and not plan.optimizer_in_loop:
        return optimizer_of_text(model.optimizer)[0].state_names
    return plan.shards_optimizer.state_names


def _pieces(plan: RunPlan, model: v1.ModelSpec, holders: int) -> list[Sequence[tuple[int, int]]]:
    """The ranges of every vector of a model that each of `holders` nodes holds, part by part."""
    each = holders // plan.parts
    places = [part_map_of(model, part) for part in range(plan.parts)]
    return [place.unsplit(own) for place in places for own in _pieces_of(plan, model, place.elems, each)]


def _pieces_of(
    plan: RunPlan, model: v1.ModelSpec, elems: int, holders: int
) -> list[Sequence[tuple[int, int]]]:
    """The ranges of a part's vectors that each of its holders holds."""
    if isinstance(plan.strategy, GroupStrategy):
        bucket_elems = plan.strategy.bucket_elems(itemsize_bytes(model.dtype), model.chunk_elems)
        buckets = Buckets(elems, bucket_elems, holders)
        return [buckets.owned(rank) for rank in range(holders)]
    if isinstance(plan.strategy, PeerStrategy):
        slices = (slice_of(elems, rank, holders) for rank in range(holders))
        return [[(start, stop)] if start < stop else [] for start, stop in slices]
    chunks = ChunkMap(elems, model.chunk_elems, holders)
    return [[chunks.bounds(chunk) for chunk in chunks.chunks_of(rank)] for rank in range(holders)]


# ---- workers ----------------------------------------------------------------------------


def build_worker(
    plan: RunPlan,
    runtime: Runtime,
    endpoint: Endpoint,
    rank: int,
    model: Model,
    *,
    clock: RunClock | None = None,
    carried: Carried | None = None,
) -> WorkerNode:
    """Builds one worker, with its own instance of the model; its endpoint knows the coordinator.

    `clock` is the clock of the node's events, if it has one already, and `carried` is the process's.
    """
    config = worker_config(plan, rank, model)
    if plan.job.record:
        config = replace(config, log=recording_of(plan, runtime))
    member = member_of(plan, runtime, endpoint, "worker", rank, clock=clock)
    if carried is not None and carried.boundary != plan.phase.boundary:
        carried.forget()  # this process has been in no phase since
    return WorkerNode(runtime, endpoint, member, config, carried)


def build_replica(
    plan: RunPlan,
    runtime: Runtime,
    endpoint: Endpoint,
    model: Model,
    *,
    clock: RunClock | None = None,
    carried: Carried | None = None,
) -> WorkerNode | PartNode:
    """Builds the process of a replica that the endpoint's name says: the worker, or one of its parts.

    Args:
        model: the whole model, not yet built; a part of a split replica keeps its own part of it.
        plan, runtime, endpoint, clock, carried: as for `build_worker`.
    """
    name = endpoint.identity.name
    rank, part = int(name.rpartition("-")[2]), part_of(name)
    if plan.parts == 1:
        return build_worker(plan, runtime, endpoint, rank, model, clock=clock, carried=carried)
    config = worker_config(plan, rank, _model_of(plan, model, part), part)
    member = member_of(plan, runtime, endpoint, role_of_part(part), rank, clock=clock)
    return (PartNode if part else WorkerNode)(runtime, endpoint, member, config)


def _model_of(plan: RunPlan, model: Model, part: int) -> Model:
    """The model of a process of a replica: the whole one, or a part. Raises ConfigError if it cannot be divided."""
    if plan.parts == 1:
        return model
    if not isinstance(model, TorchModel):
        raise ConfigError(
            f"split={plan.parts}: the model is a {type(model).__name__}; only a module can be divided: make the "
            "model with gradstream.from_torch"
        )
    ids = np.arange(min(2, plan.job.data.num_samples or 0), dtype=np.int64)
    example, pipeline = plan.job.data.batch(ids), plan.job.pipeline
    if isinstance(pipeline, Hybrid):
        return HybridModel(model, example, plan.parts, part, pipeline.layers)
    apart, rounds = isinstance(pipeline, SyntheticGradients), 2 if pipeline == "interleaved" else 1
    return PartModel(model, example, plan.parts, part, apart=apart, rounds=rounds)


def grouped_rule(plan: RunPlan, model: Model, part: int = 0) -> GroupedRule | None:
    """The update rule that needs parameter names, for a part of the whole model; see `RunPlan.grouped`."""
    return plan.grouped(_model_of(plan, model, part)) if plan.by_name else None


def check_model(plan: RunPlan) -> None:
    """Refuses a model before anything is started, if it cannot be divided, or its rule by tensors does not fit it.

    Raises:
        ConfigError: it cannot be divided, or not into this many parts; its parts cannot follow the schedule, or
            not with this many micro-batches, or send no activations of the dtype; or a group matches no parameter.
    """
    if plan.parts > 1 and not plan.open_ended:
        model, job = _model_of(plan, build_model(plan.job), 0), plan.job
        assert isinstance(model, PartModel)
        if job.pipeline in STREAMING:
            check_streaming(job.pipeline, model.plan, job.micro_batches)
        elif isinstance(job.pipeline, str):
            make_schedule(job.pipeline, model.plan, job.micro_batches)
        check_encodable(model.plan, job.pipeline_dtype)
    if plan.by_name:
        grouped_rule(plan, build_model(plan.job))


def worker_config(plan: RunPlan, rank: int, model: Model, part: int = 0) -> WorkerConfig:
    """The configuration of a worker, or of a part of its replica; see `build_replica`."""
    how = "auto"
    if isinstance(plan.strategy, GroupStrategy):
        how = plan.strategy.algorithm if plan.strategy.exchange == "auto" else plan.strategy.exchange
    return WorkerConfig(plan=plan, rank=rank, part=part, model=model, form_group=partial(form_group, how=how))


# ---- shards and workers -----------------------------------------------------------------


def recording_of(plan: RunPlan, runtime: Runtime) -> Log:
    """The recording of the order of a node's events, for a replay."""
    path = f"{FOLDER}/{plan.id}/{runtime.node}.rec"
    resume = None if plan.resume is None else plan.resume.as_json()
    return Log(runtime.storage, path, {**origin_of(runtime.node, plan.id), "resume": resume})


def member_of(
    plan: RunPlan,
    runtime: Runtime,
    endpoint: Endpoint,
    role: str,
    rank: int,
    *,
    clock: RunClock | None = None,
) -> Member:
    """The membership of a shard or a worker in the run, before it has joined."""
    identity = endpoint.identity
    node = v1.Node(
        name=identity.name,
        role=role,
        rank=rank,
        address=endpoint.address,
        incarnation=identity.incarnation,
        elsewhere=isinstance(runtime.storage, ElsewhereStorage),
    )
    return Member(
        runtime,
        endpoint,
        node,
        software=__version__,
        deadlines=plan.job.deadlines,
        clock=clock or clock_of(plan, runtime),
        boundary=plan.phase.boundary,
    )


def clock_of(plan: RunPlan, runtime: Runtime, zero_ns: int | None = None) -> RunClock:
    """The clock of a node's events; `zero_ns` as in `RunClock`."""
    return RunClock(runtime, plan.resume.time_s if plan.resume is not None else 0.0, zero_ns)
