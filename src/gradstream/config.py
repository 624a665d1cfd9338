"""The `Job`: everything that a run is told, checked before anything is started."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast

import gradstream
from gradstream.callbacks import check_callbacks
from gradstream.checkpoint.manifest import Resume
from gradstream.checkpoint.policy import Policy, parse_every
from gradstream.data.base import DEFAULT_BATCH_SIZE, Dataset
from gradstream.data.shares import MEASURED
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.membership.goal import Until
from gradstream.model.base import Model
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.optim.groups import groups_of
from gradstream.registry import (
    find_dataset,
    find_function,
    find_optimizer,
    find_strategy,
    optimizer_of_text,
    place_of,
)
from gradstream.roles import Cast
from gradstream.server.chunks import ChunkMap
from gradstream.sparse.updates import check_compiler
from gradstream.strategies.base import Strategy
from gradstream.transport.offers import CHOICES, Choice
from gradstream.worker.evaluation import EvaluationPlan, Metric
from gradstream.worker.gradient import Clip

__all__ = [
    "Deadlines",
    "Job",
    "JobOptions",
    "build_model",
    "check",
    "check_script",
    "is_open_ended",
    "is_script",
    "make_job",
    "num_servers",
    "overrides",
    "plain",
    "policy_of",
    "with_overrides",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long a run waits before it gives up, in seconds. All are bounds of silence, not of work.

    Args:
        join_s: for all nodes to have joined; building models and reading data included.
        silence_s: for a peer that has an answer to give.
        lease_s: for a sign of life of a node, before it counts as lost.
        retry_s: for a push or fetch to succeed, over all its retries.
        cut_s: that workers stand still for a checkpoint, the minibatches that they are in included.
    """

    join_s: float = 60.0
    silence_s: float = 30.0
    lease_s: float = 10.0
    retry_s: float = 120.0
    cut_s: float = 120.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run, as the user asks for it.

    Args:
        model: a `Model`, or a function without arguments that makes one.
        data: what to train on; a name or "file.py:function" is looked up (`gradstream data info`).
        strategy: how to distribute: a name, "file.py:Class", or a Strategy.
        strategy_options: fields of the strategy, where it is given by name.
        optimizer: the update rule: a name or an Optimizer; None leaves it to the strategy.
        groups: settings of the update rule for some parameters, by patterns of their names:
            [{"match": "*.bias", "weight_decay": 0.0}, {"match": "head.*", "lr_scale": 10.0}]. Later ones win.
        workers: how many replicas of the model.
        servers: how many shards of the parameter server; None is one, or none for a strategy without.
        batch_size: samples per minibatch of one worker: one number, or one per worker.
        shares: relative amounts of data, one per worker, where the strategy partitions the data. "measured":
            the workers' parts of a synchronous round follow their measured speed; the round stays as large.
        accumulate: k: a step goes through k minibatches, one after the other, and counts as one with
            the joined minibatch, in the memory of a small one.
        clip_norm: greatest length of a worker's mean gradient over a step, clipped before the exchange.
        clip_value: greatest size of an element of it. Both keep exchange from overlapping backprop.
        epochs: passes over the data. Exactly one of `epochs` and `steps` is given.
        steps: steps per worker: minibatches, or k of them.
        evaluate_every: steps (synchronous: rounds) between two looks at held-out samples, or "epoch". The
            worker of the lowest rank looks while the others go on or wait for it; besides, at the end.
        metrics: functions (outputs, targets) to a number, by name, asked in each evaluation and in
            `Run.evaluate`: the mean over the samples of a batch. Or the place of one: "file.py:top5".
        until: ends the run before its epochs or steps do: `gradstream.until(accuracy=0.9, seconds=3600)`.
        callbacks: objects told of the run in the process that calls `train`, by those of these methods that
            they have: on_start(info), on_step(event), on_evaluate(event), on_end(run).
        seed: of initial parameters, order of samples and dropout.
        name: part of the run directory's name; None takes the job file's.
        run_dir: where the run is kept; None makes runs/<utc>-<name>.
        record_machine: whether the run directory says on which machine, in which environment, by which
            command and at which commit of git the run was made, with which versions.
        record: note in which order things happen, so that the run can be replayed bit for bit:
            `gradstream.replay`. Of strategies that go through servers.
        chunk_elems: elements per chunk, the unit of exchange: a multiple of 64 up to 1048576.
        checkpoint_every: about how often a checkpoint is kept: a number of steps, "epoch", or a time such
            as "10min"; None only when the run is stopped. None is made at the end: the result is.
        keep_last: how many of the newest checkpoints are kept.
        keep_best: keep the one with the best evaluation besides, where the run is evaluated.
        carrier: what chunks travel by between two nodes: "grpc", "tcp" or "shm", or "auto", which takes the
            best that both have. Membership is on gRPC in any case.
        connections: over how many sockets "tcp" carries bulk between two nodes: several fill a long fat line
            that one does not.
        deadlines: see `Deadlines`.
        spec: where nodes find model and data: "file.py", "file.py:function", "module:function".
            Filled in by `load_job` and `train`.
        origins: where values were given that are not the job file's, by key: "workers",
            "strategy.push_every". Filled in by `train` and `gradstream.settings`.
    """

    model: Model | Callable[[], Model] = field(kw_only=False)
    data: Dataset = field(kw_only=False)
    strategy: str | Strategy = "synchronous"
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | Optimizer | None = None
    groups: Sequence[Mapping[str, Any]] = ()
    workers: int = 2
    servers: int | None = None
    batch_size: int | Sequence[int] = DEFAULT_BATCH_SIZE
    shares: Sequence[float] | Literal["measured"] | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    epochs: int | None = None
    steps: int | None = None
    evaluate_every: int | Literal["epoch"] | None = None
    metrics: Mapping[str, str | Metric] = field(default_factory=dict)
    until: Until | None = None
    callbacks: Sequence[Any] = ()
    seed: int = 0
    name: str | None = None
    run_dir: Path | None = None
    record_machine: bool = True
    record: bool = False
    chunk_elems: int = 262_144
    checkpoint_every: int | str | None = "10min"
    keep_last: int = 2
    keep_best: bool = True
    carrier: Choice = "auto"
    connections: int = 1
    deadlines: Deadlines = field(default_factory=Deadlines)
    spec: str | None = None
    origins: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.data, str):
            object.__setattr__(self, "data", find_dataset(self.data))


class JobOptions(TypedDict, total=False):
    """The fields of a `Job` besides model and data, as keyword arguments."""

    strategy: str | Strategy
    strategy_options: Mapping[str, Any]
    optimizer: str | Optimizer | None
    groups: Sequence[Mapping[str, Any]]
    workers: int
    servers: int | None
    batch_size: int | Sequence[int]
    shares: Sequence[float] | Literal["measured"] | None
    accumulate: int
    clip_norm: float | None
    clip_value: float | None
    epochs: int | None
    steps: int | None
    evaluate_every: int | Literal["epoch"] | None
    metrics: Mapping[str, str | Metric]
    until: Until | None
    callbacks: Sequence[Any]
    seed: int
    name: str | None
    run_dir: Path | None
    record_machine: bool
    record: bool
    chunk_elems: int
    checkpoint_every: int | str | None
    keep_last: int
    keep_best: bool
    carrier: Choice
    connections: int
    deadlines: Deadlines


def make_job(
    model: Model | Callable[[], Model] | Job,
    data: Dataset | str | None = None,
    **options: Unpack[JobOptions],
) -> Job:
    """A job from the arguments of `train` and `simulate`: model, data and options, or a job to change.

    Raises:
        UnknownNameError: no such option; says the nearest one.
        ConfigError: a model without data.
    """
    known = [entry.name for entry in dataclasses.fields(Job)]
    for name in options:
        if name not in known:
            raise UnknownNameError("argument", name, known)
    if isinstance(model, Job):
        changed: dict[str, Any] = dict(options)
        if data is not None:
            changed["data"] = data
        changed["origins"] = {**model.origins, **dict.fromkeys(options, "argument")}
        return dataclasses.replace(model, **changed)
    if data is None:
        raise ConfigError("data is missing: expected a Dataset, as gradstream.from_arrays makes one")
    return Job(model, cast(Dataset, data), **options)


def build_model(job: Job) -> Model:
    """The job's model; made now where the job has a function that makes it.

    Raises:
        ConfigError: what came of it is not a model.
    """
    model = job.model
    if not hasattr(model, "gradient") and callable(model):
        model = model()
    if not hasattr(model, "gradient"):
        raise ConfigError(
            f"model is {type(job.model).__name__}; expected a Model, or a function that makes one: "
            "wrap yours with gradstream.from_functions or gradstream.from_torch"
        )
    return cast(Model, model)


def policy_of(job: Job) -> Policy:
    """When a job's checkpoints are made, and which are kept. Raises ConfigError."""
    _whole("keep_last", job.keep_last, least=1)
    every = parse_every(job.checkpoint_every)
    if every is not None and every.unit == "epochs" and is_open_ended(job):
        raise ConfigError(
            "checkpoint_every='epoch': a training loop of your own counts its epochs itself; "
            "give a number of steps, or a time such as '10min'"
        )
    return Policy(every=every, keep_last=job.keep_last, keep_best=job.keep_best)


def cast_of(job: Job, run_id: str, *, resume: Resume | None = None, keeps: bool = True) -> Cast:
    """The run that a job asks for, with its strategy and update rule found and its data planned.

    Args:
        run_id: other runs' nodes are refused.
        resume: where the run goes on; None where it begins.
        keeps: whether there is a disk for checkpoints.

    Raises:
        ConfigError: anything that can be known to be wrong before a node is started.
    """
    check(job)
    if resume is not None:
        _check_resumed(job, resume)
    strategy = find_strategy(job.strategy, job.strategy_options)
    _check_quorum(job, strategy)
    if job.record:
        _check_recorded(job, strategy)
    _check_drive(job, strategy)
    optimizer = strategy.optimizer() if job.optimizer is None else find_optimizer(job.optimizer)
    if strategy.through == "shared":
        _check_shared(job, strategy, optimizer)
    model = job.model
    cast = Cast(
        job=run_id,
        software=gradstream.__version__,
        strategy=strategy,
        optimizer=optimizer,
        workers=job.workers,
        servers=num_servers(job, strategy),
        batch_size=job.batch_size,
        shares=job.shares,
        groups=groups_of(job.groups, optimizer),
        accumulate=job.accumulate,
        clip=Clip(job.clip_norm, job.clip_value),
        evaluation=EvaluationPlan(job.evaluate_every, metrics_of(job)),
        until=job.until,
        epochs=job.epochs,
        steps=job.steps,
        seed=job.seed,
        chunk_elems=job.chunk_elems,
        data=job.data,
        num_parameters=0,  # told by the model that the first worker registers
        reduction=getattr(model, "reduction", "mean"),
        open_ended=is_open_ended(job),
        find_optimizer=optimizer_of_text,
        record=job.record,
        policy=policy_of(job) if keeps else None,
        resume=resume,
        **dataclasses.asdict(job.deadlines),
    )
    cast.ledger()
    return cast


def num_servers(job: Job, strategy: Strategy) -> int:
    """How many shards there are: as many as are asked for, where the strategy has any. Raises ConfigError."""
    name = type(strategy).__name__
    if strategy.through != "servers":
        if job.servers:
            how = "in a group of workers" if strategy.through == "group" else "in memory that workers share"
            raise ConfigError(f"servers={job.servers}, but {name} exchanges {how}, without: leave it out")
        return 0
    if job.servers == 0:
        raise ConfigError(f"servers=0: {name} goes through a parameter server; expected at least 1")
    return 1 if job.servers is None else job.servers


def _check_shared(job: Job, strategy: Strategy, optimizer: Optimizer) -> None:
    """Raises where a vector that workers write without waiting for each other cannot do what is asked for."""
    name = type(strategy).__name__
    check_compiler(f"what {name} does to shared memory")
    if is_open_ended(job):
        raise ConfigError(f"{name} has no part for a training loop of your own: give it a model and data")
    if not isinstance(optimizer, SGD) or optimizer.state_names or optimizer.weight_decay or job.groups:
        raise ConfigError(
            f"{name} adds -lr·gradient to single components, and has no state of them: got {optimizer}"
            f"{' and groups' if job.groups else ''}; expected gradstream.SGD(lr), without momentum, decay or "
            "groups (sparse models have l2=)"
        )


def is_open_ended(job: Job) -> bool:
    """Whether loops of the user's own bring the data, nobody knows how much."""
    return hasattr(job.data, "loop")


def _check_resumed(job: Job, resume: Resume) -> None:
    """Another seed, or other data, is another order of samples: what is done of it means nothing then."""
    for name, got, expected in (
        ("seed", job.seed, resume.seed),
        ("samples of the data", job.data.num_samples, resume.num_samples),
    ):
        if got != expected:
            raise ConfigError(
                f"{name}={got}, but {resume.folder} is of a run with {name}={expected}; expected {expected}"
            )


# What a training loop of the user's own decides itself.
_OF_THE_LOOP = (
    "optimizer",
    "groups",
    "batch_size",
    "shares",
    "accumulate",
    "clip_norm",
    "clip_value",
    "epochs",
    "steps",
    "evaluate_every",
    "metrics",
)


def is_script(job: Job) -> bool:
    """Whether the job is a script that calls `gradstream.join()`."""
    return hasattr(job.data, "job")


def check_script(job: Job) -> None:
    """Raises ConfigError where a script is asked for what its own loop decides."""
    defaults = {entry.name: entry for entry in dataclasses.fields(Job)}
    for name in _OF_THE_LOOP:
        entry, value = defaults[name], getattr(job, name)
        made = entry.default_factory() if entry.default_factory is not dataclasses.MISSING else entry.default
        if plain(value) != plain(made):
            raise ConfigError(
                f"{name}={value!r}: this script has a training loop of its own; change it there"
            )


def check(job: Job) -> None:
    """Looks at everything that can be wrong without starting anything.

    Raises:
        ConfigError: names the argument, what it is, and what it may be.
    """
    if not any(hasattr(job.data, name) for name in ("batch", "feed", "loop")) or not hasattr(
        job.data, "num_samples"
    ):
        raise ConfigError(
            f"data is {type(job.data).__name__}; expected a Dataset: wrap yours with gradstream.from_arrays, "
            "from_dataset, from_loader or from_stream"
        )
    for name in ("workers", "accumulate", "connections"):
        _whole(name, getattr(job, name), least=1)
    if job.servers is not None:
        _whole("servers", job.servers, least=0)
    _whole("seed", job.seed, least=0)
    if hasattr(job.model, "state_dict"):
        raise ConfigError(
            f"model is a torch module, {type(job.model).__name__}; expected a function that builds it, and a "
            "loss: gradstream.from_torch(build, loss)"
        )
    if not is_open_ended(job):
        _check_length(job)
    if isinstance(job.shares, str) and job.shares != MEASURED:
        raise ConfigError(f"shares={job.shares!r}: expected a number for each worker, or {MEASURED!r}")
    _whole("chunk_elems", job.chunk_elems, least=1)
    ChunkMap(0, job.chunk_elems, 1)
    for entry in dataclasses.fields(job.deadlines):
        seconds = getattr(job.deadlines, entry.name)
        if not _is_positive(seconds):
            raise ConfigError(f"deadlines.{entry.name} = {seconds!r}: expected a positive number of seconds")
    for name in ("clip_norm", "clip_value"):
        bound = getattr(job, name)
        if bound is not None and not _is_positive(bound):
            raise ConfigError(f"{name}={bound!r}: expected a finite number > 0, or None for no clipping")

    if job.carrier not in CHOICES:
        raise ConfigError(f"carrier={job.carrier!r}: expected one of {', '.join(CHOICES)}")
    _check_evaluation(job)
    check_callbacks(job.callbacks)


def _check_length(job: Job) -> None:
    if (job.epochs is None) == (job.steps is None):
        got = "neither" if job.epochs is None else f"epochs={job.epochs} and steps={job.steps}"
        raise ConfigError(f"expected exactly one of epochs and steps, got {got}")
    limit = "steps" if job.epochs is None else "epochs"
    _whole(limit, getattr(job, limit), least=1)
    if job.data.num_samples is not None and job.workers > job.data.num_samples:
        raise ConfigError(
            f"workers={job.workers}, but {job.data.name!r} has {job.data.num_samples} samples: "
            "each worker needs at least one"
        )


def _check_quorum(job: Job, strategy: Strategy) -> None:
    if strategy.quorum(job.workers) is None:
        return
    what = f"the {type(strategy).__name__.lower()} strategy with backup workers"
    if is_open_ended(job):
        raise ConfigError(
            f"{what} makes a late worker skip minibatches, which a training loop of your own cannot: "
            "leave out backup"
        )
    if job.shares == MEASURED:
        raise ConfigError(
            f"shares={MEASURED!r} waits for what every worker has measured, and {what} does not wait for all "
            "of them: use one of the two"
        )


def _check_recorded(job: Job, strategy: Strategy) -> None:
    name = type(strategy).__name__
    if strategy.through == "group":
        why = f"{name} has no server whose order could differ: the same seed repeats it"
    elif strategy.through == "shared":
        why = f"{name} has no order: workers write the same memory at once"
    elif is_open_ended(job):
        why = "the gradients of a training loop of your own cannot be computed again without it"
    elif job.shares == MEASURED:
        why = f"shares={MEASURED!r} follow the clock, which a replay does not have"
    else:
        return
    raise ConfigError(f"record=True: {why}; leave record out")


def _check_drive(job: Job, strategy: Strategy) -> None:
    if not strategy.drives():
        return
    name = type(strategy).__name__
    if strategy.cut != "partitions" or strategy.through != "servers":
        raise ConfigError(
            f"{name} has a drive(), and its workers go through rounds together: who is held back would be "
            'missing in each; expected cut = "partitions", and servers'
        )
    if is_open_ended(job):
        raise ConfigError(
            f"{name} holds workers back for a while, and others take their minibatches: a training loop of "
            "your own has data of its own; leave out warm starts and waves"
        )


def _check_evaluation(job: Job) -> None:
    every = job.evaluate_every
    if job.until is not None and not isinstance(job.until, Until):
        raise ConfigError(f"until={job.until!r}: expected gradstream.until(accuracy=0.9), for example")
    if every is None:
        if job.until is not None and job.until.accuracy is not None:
            raise ConfigError(
                f"until accuracy={job.until.accuracy}, but nobody looks at held-out samples: "
                "give evaluate_every"
            )
        return
    if every != "epoch":
        _whole("evaluate_every", every, least=1, other=", or 'epoch'")
    if not job.data.num_test_samples:
        raise ConfigError(
            f"evaluate_every={every!r}, but the data set {job.data.name!r} holds no samples out; give it "
            "some (test_inputs and test_targets of gradstream.from_arrays)"
        )


def metrics_of(job: Job) -> dict[str, Metric]:
    """The job's metrics as functions. Raises ConfigError for a place where there is none."""
    return {name: find_function(f) if isinstance(f, str) else f for name, f in job.metrics.items()}


def _is_positive(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(cast(float, value)) and cast(float, value) > 0


def _whole(name: str, value: object, *, least: int, other: str = "") -> None:
    try:
        number = operator.index(cast(Any, value))
    except TypeError:
        raise ConfigError(f"{name}={value!r}: expected a whole number{other}") from None
    if isinstance(value, bool) or number < least:
        raise ConfigError(f"{name}={value!r}: expected at least {least}")


# Model and data come from the job file; strategy and optimizer travel as class and fields.
_NOT_PLAIN = ("model", "data", "callbacks", "strategy", "strategy_options", "optimizer", "spec", "origins")


def overrides(job: Job) -> dict[str, Any]:
    """The fields of a job that are plain values, as JSON holds them."""
    names = [entry.name for entry in dataclasses.fields(job) if entry.name not in _NOT_PLAIN]
    fields = {name: plain(getattr(job, name)) for name in names}
    return {**fields, "metrics": {name: _place_of(metric) for name, metric in job.metrics.items()}}


def _place_of(metric: str | Metric) -> str:
    """Where to find it; "" if only running the job file again brings it forth."""
    try:
        return metric if isinstance(metric, str) else place_of(metric)
    except ConfigError:
        return ""


def with_overrides(job: Job, fields: Mapping[str, Any]) -> Job:
    """The job with the fields that `overrides` has made of another."""
    values = dict(fields)
    values["deadlines"] = Deadlines(**values["deadlines"])
    if values.get("until") is not None:
        values["until"] = Until(**values["until"])
    if values["run_dir"] is not None:
        values["run_dir"] = Path(values["run_dir"])
    values["metrics"] = {
        name: place or _own_metric(job, name) for name, place in values.get("metrics", {}).items()
    }
    return dataclasses.replace(job, **values)


def _own_metric(job: Job, name: str) -> str | Metric:
    if name not in job.metrics:
        raise ConfigError(
            f"metrics[{name!r}] is not in the job file, and has no place that other processes find it by: "
            "define it at the top level of a file"
        )
    return job.metrics[name]


def plain(value: Any) -> Any:
    """A value of a field, as JSON holds it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Sequence):
        return list(value)
    return value
