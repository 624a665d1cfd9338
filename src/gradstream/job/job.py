"""The `Job`: a training run as the user asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, Unpack, cast

from gradstream.codec.base import Codec
from gradstream.codec.low_rank import PowerSGD
from gradstream.coordinator.stopping import Until
from gradstream.data.arrays import from_arrays
from gradstream.data.base import DEFAULT_BATCH_SIZE, Dataset
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.metrics import Metric
from gradstream.job.phases import Phase, phase_of
from gradstream.job.registry import find_dataset, find_strategy
from gradstream.model.base import Model
from gradstream.model.device_model import on_device
from gradstream.model.torch_module import TorchModel
from gradstream.optim.base import Optimizer
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.runtime.deadlines import Deadlines
from gradstream.strategies.base import ServerStrategy, Strategy
from gradstream.transport.offers import Choice
from gradstream.wire.chunks import CHUNK_ELEMS

Data = Dataset | str | tuple[Any, Any]
"""The data of a run: a data set, its name, or the pair (inputs, targets) of arrays."""

Pipeline = Literal[
    "gpipe",
    "1f1b",
    "interleaved",
    "zero-bubble",
    "pipedream",
    "pipedream-vertical",
    "2bw",
    "delayed",
]
"""The order in which the parts of a split model compute; see `pipeline.schedule`."""

RIVALS = frozenset({"epochs", "steps", "phases"})
"""Fields that exclude each other: a later value of a field removes earlier values of the others."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run, as the user asks for it.

    Args:
        model: a `Model`, or a function without arguments that makes one.
        data: the data set; a name or "file.py:function" is looked up (`gradstream data info`), and a
            pair of arrays (inputs, targets) becomes `from_arrays(inputs, targets)`.
        strategy: how to distribute training: a name, "file.py:Class", or a Strategy. "auto" measures the links for at
            most
            20 steps, and then becomes allreduce or local SGD: see `gradstream.coordinator.link_choice`.
        strategy_options: fields of the strategy, if it is set by name.
        optimizer: the update rule: a name or an Optimizer; None takes the strategy's default.
        codec: compresses what workers send: a name such as "int8" or "top-k", or a codec
            (`gs.codecs`). None sends full precision. See `docs/codecs.md`.
        fetch_codec: compresses the parameters that servers send to workers for a gradient: they are rounded anew for
            each fetch. None sends full precision. See `docs/codecs.md`.
        groups: settings of the update rule for some parameters, by patterns of their names:
            [{"match": "*.bias", "weight_decay": 0.0}, {"match": "head.*", "lr_scale": 10.0}]. Later entries win.
        workers: number of replicas of the model.
        servers: number of shards of the parameter server; None is 1, or 0 for a strategy without a server.
        split: number of processes that share one replica of the model, each holding a part. 1 does not
            split it. The model must be `from_torch`; each part has its own `servers` shards.
        micro_batches: number of pieces into which a split replica divides each minibatch, so that its parts work
            at the same time. The gradient stays that of the whole minibatch.
        pipeline: in which order the parts compute: "gpipe" (all forward passes first) or "1f1b" (a backward
            pass as soon as possible, which keeps fewer activations). "interleaved" gives each part two stages;
            "zero-bubble" moves the gradients of weights into idle time. Under "pipedream", "pipedream-vertical", "2bw"
            and "delayed" the next minibatches begin before the update, with several versions of the weights. With
            `gs.pipeline.SyntheticGradients(...)` parts train independently, each by a predicted gradient of its output.
            With `gs.pipeline.Hybrid(...)` each part has its own samples, and only layers such as the final linear ones
            are divided.
        recompute: whether parts of a split model drop the activations of a forward pass and compute them again
            before its backward pass: less memory, for up to one more forward pass. The gradient has the same bits.
        pipeline_dtype: "float16" or "bfloat16" sends float32 activations and their gradients between parts in two
            bytes per number. None sends them as they are.
        batch_size: samples per minibatch of one worker: one number, or one per worker.
        shares: relative amounts of data, one per worker: of each round, or of each epoch where that is divided into
            partitions. Refused where workers take minibatches from a queue. "measured": the sizes of the workers'
            minibatches follow their measured speed; their sum stays the same. Where no worker waits for others, as
            under Downpour, fast workers take more minibatches anyway.
        assignment: how minibatches are assigned to workers, for strategies without rounds. "queue": each
            worker takes the next minibatch of the epoch when it needs one. "partitions": each has a part of every
            epoch, as large as its share; workers that have finished theirs help the others. None: as the
            strategy chooses, and partitions if the data is a stream.
        accumulate: number k of minibatches per step. A worker computes them one after the other; the step
            counts as one with the joined minibatch, but needs only the memory of a small one.
        clip_norm: greatest norm of a worker's mean gradient over a step, clipped before the exchange.
        clip_value: greatest absolute value of an element of that gradient. With either clipping, the
            exchange does not overlap with backpropagation.
        non_finite: what happens to a gradient with a NaN or an infinity. "skip" drops it: the worker goes on
            with its next minibatch, the samples count as dropped, and an event names worker, step and
            minibatch. "error" ends the run at the first such gradient.
        quarantine_after: number of consecutive such gradients after which a worker counts as lost. If the
            newest gradients of all other workers are not finite either, the model has diverged, and the run ends.
        epochs: passes over the data. Exactly one of `epochs`, `steps` and `phases` is given.
        steps: steps per worker: minibatches, or k of them with `accumulate`; rounds, under strategies in rounds.
        phases: divides the run into consecutive phases, each with its own strategy, number of workers, batch size
            and learning rate: see `gradstream.job.phases.Phase`.
        evaluate_every: steps (synchronous: rounds) between two evaluations on held-out samples, or "epoch".
            The worker of the lowest rank evaluates, while the others go on or wait for it; there is one more
            evaluation at the end. Strategy "auto" counts minibatches, and takes the nearest number of rounds.
        noise_scale: whether to measure the gradient noise scale tr Σ/|G|², in one of 16 rounds: about the number of
            samples per step that is still worthwhile. For `synchronous` and `allreduce`; see `docs/large-batch.md`. It
            changes no result.
        metrics: functions from the (outputs, targets) of all held-out samples to a number, by name; or objects with
            `update(outputs, targets)` and `compute()`, like those of torchmetrics, which get them batch by batch. Each
            evaluation and `Run.evaluate` compute them. Or their places: "file.py:top5".
        until: ends the run before its epochs or steps do: `gradstream.until(accuracy=0.9, seconds=3600)`.
        callbacks: objects with some of these methods, which are called in the process that calls `train`:
            on_start(info), on_step(event), on_evaluate(event), on_log(event), on_end(run).
        trackers: services that also get the curves of a run on real machines: "tensorboard", "wandb",
            "mlflow", "trackio".
        seed: seed of initial parameters, order of samples and dropout.
        name: part of the run directory's name; None takes the job file's.
        run_dir: the run directory; None makes runs/<utc>-<name>.
        record_machine: whether the run directory holds machine, environment, command, git commit and
            package versions.
        record: whether nodes record the order of events, so that `gradstream.ext.replay.replay` repeats the run
            bit for bit. For strategies that use servers.
        allow_lost: whether a run with your own training loop may finish without data of a lost worker that
            the others could not take over (they can if `session.shard` made the DataLoader). If not,
            such a run ends with an error that says what is missing.
        allow_changed: whether a resumed run may continue with changed files of your code or changed data; a message
            names them. If not, it is refused.
        max_restarts: how often the launcher restarts each worker of its machine that was killed, or was
            lost while it stood still: under strategies that go on without a lost worker. 0 restarts none.
        acknowledge: when a shard acknowledges a push. "applied": once it is in the parameters; the run ends if a
            shard dies. "replicated": once another shard has the result in its memory too; needs `servers` >= 2.
            "logged": once a file of the run directory has it. With the last two, a new process continues for a
            killed shard, and no acknowledged push is lost. None: "replicated" where several machines have shards and
            the strategy allows it, so that none of them takes parameters along, else "applied".
        chunk_elems: elements per chunk, the unit of exchange: a multiple of 64 up to 4194304. None is 262144;
            more for large models if all nodes exchange through shared memory
            (`wire.chunks.shared_chunk_elems`). It changes no result, except where fragments of `streaming-diloco` end.
        checkpoint_every: steps between two checkpoints (strategy "auto": as for `evaluate_every`), "epoch", or a time
            such as "10min", the first then after a minute; None makes a checkpoint only when the run is stopped. At the
            end of a run there is its result and no checkpoint.
        keep_last: number of newest checkpoints that are kept.
        keep_best: whether to keep the parameters with the best evaluation, as they were evaluated, in
            `checkpoints/best` (not of split models, nor while a worker on another machine evaluates), and the
            checkpoint after it. The best is that of the figure that `until` monitors; without `until`, that with the
            highest accuracy or, if there is no accuracy, the lowest loss. Of equal ones it is the first.
        device: device of a `from_torch` model: "cpu", "cuda" (worker r takes GPU r modulo the number of GPUs
            of its machine), "cuda:1", or "auto": an accelerator if a machine has one. Gradients and
            parameters are exchanged through main memory.
        carrier: how chunks travel between two nodes: "grpc", "tcp" or "shm", or "auto", which takes the
            best that both have. Membership always uses gRPC.
        connections: number of connections per pair of nodes for bulk data, over "tcp" and, up to 8, over "grpc";
            several can fill a fast link with a long delay that one cannot.
        deadlines: see `Deadlines`.
        spec: place where nodes find model and data: "file.py", "file.py:function", "module:function".
            Filled in by `load_job` and `train`.
        argv: command line that nodes find in `sys.argv` when they read the job file: the launcher's own.
            Filled in by `load_job` and `train`.
        cwd: working directory in which nodes read the job file: that of the launcher before it read the file, which
            may change it. Filled in by `load_job` and `train`.
        origins: origin of each value that does not come from the job file, by key: "workers",
            "strategy.push_every". Filled in by `train` and `gradstream.job.settings`.

    Example:
        >>> job = gs.Job(model, data, strategy="ssp", workers=2, batch_size=8, epochs=2)
        >>> run = gs.simulate(job)
        >>> run.summary["steps"]
        16
    """

    model: Model | Callable[[], Model] = field(kw_only=False)
    data: Dataset = field(kw_only=False)
    strategy: str | Strategy = "synchronous"
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | Optimizer | None = None
    codec: str | Codec | PowerSGD | None = None
    fetch_codec: Literal["float16", "bfloat16", "int8", "int4"] | None = None
    groups: Sequence[Mapping[str, Any]] = ()
    workers: int = 2
    servers: int | None = None
    split: int = 1
    micro_batches: int = 1
    pipeline: Pipeline | Hybrid | SyntheticGradients = "gpipe"
    recompute: bool = False
    pipeline_dtype: Literal["float16", "bfloat16"] | None = None
    batch_size: int | Sequence[int] = DEFAULT_BATCH_SIZE
    shares: Sequence[float] | Literal["measured"] | None = None
    assignment: Literal["queue", "partitions"] | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    non_finite: Literal["skip", "error"] = "skip"
    quarantine_after: int = 3
    epochs: int | None = None
    steps: int | None = None
    phases: Sequence[Phase] = ()
    evaluate_every: int | Literal["epoch"] | None = None
    noise_scale: bool = False
    metrics: Mapping[str, str | Metric] = field(default_factory=dict)
    until: Until | None = None
    callbacks: Sequence[Any] = ()
    trackers: Sequence[str] = ()
    seed: int = 0
    name: str | None = None
    run_dir: Path | None = None
    record_machine: bool = True
    record: bool = False
    allow_lost: bool = False
    allow_changed: bool = False
    max_restarts: int = 100
    acknowledge: Literal["applied", "logged", "replicated"] | None = None
    chunk_elems: int | None = None
    checkpoint_every: int | str | None = "10min"
    keep_last: int = 2
    keep_best: bool = True
    device: str = "cpu"
    carrier: Choice = "auto"
    connections: int = 1
    deadlines: Deadlines = field(default_factory=Deadlines)
    spec: str | None = None
    argv: Sequence[str] | None = None
    cwd: str | None = None
    origins: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.data, str):
            object.__setattr__(self, "data", find_dataset(self.data))
        elif isinstance(self.data, tuple) and len(self.data) == 2:
            object.__setattr__(self, "data", from_arrays(*self.data))
        object.__setattr__(self, "phases", tuple(map(phase_of, self.phases or ())))


class JobOptions(TypedDict, total=False):
    """The fields of a `Job` besides model and data, as keyword arguments."""

    strategy: str | Strategy
    strategy_options: Mapping[str, Any]
    optimizer: str | Optimizer | None
    codec: str | Codec | PowerSGD | None
    fetch_codec: Literal["float16", "bfloat16", "int8", "int4"] | None
    groups: Sequence[Mapping[str, Any]]
    workers: int
    servers: int | None
    split: int
    micro_batches: int
    pipeline: Pipeline | Hybrid | SyntheticGradients
    recompute: bool
    pipeline_dtype: Literal["float16", "bfloat16"] | None
    batch_size: int | Sequence[int]
    shares: Sequence[float] | Literal["measured"] | None
    assignment: Literal["queue", "partitions"] | None
    accumulate: int
    clip_norm: float | None
    clip_value: float | None
    non_finite: Literal["skip", "error"]
    quarantine_after: int
    epochs: int | None
    steps: int | None
    phases: Sequence[Phase]
    evaluate_every: int | Literal["epoch"] | None
    noise_scale: bool
    metrics: Mapping[str, str | Metric]
    until: Until | None
    callbacks: Sequence[Any]
    trackers: Sequence[str]
    seed: int
    name: str | None
    run_dir: Path | None
    record_machine: bool
    record: bool
    allow_lost: bool
    allow_changed: bool
    max_restarts: int
    acknowledge: Literal["applied", "logged", "replicated"] | None
    chunk_elems: int | None
    checkpoint_every: int | str | None
    keep_last: int
    keep_best: bool
    device: str
    carrier: Choice
    connections: int
    deadlines: Deadlines


def make_job(
    model: Model | Callable[[], Model] | Job,
    data: Data | None = None,
    **options: Unpack[JobOptions],
) -> Job:
    """Makes a job from the arguments of `train` and `simulate`: model, data and options, or a job to change.

    A new value of `epochs` or `steps` removes the other from the job that is changed.

    Raises:
        UnknownNameError: there is no such option; the message names the nearest one.
        ConfigError: there is a model but no data.
    """
    known = [entry.name for entry in dataclasses.fields(Job)]
    for name in options:
        if name not in known:
            raise UnknownNameError("argument", name, known)
    if isinstance(model, Job):
        taken_back = RIVALS if any(options.get(name) is not None for name in RIVALS) else ()
        changed: dict[str, Any] = {**dict.fromkeys(taken_back), **options}
        if data is not None:
            changed["data"] = data
        changed["origins"] = {**model.origins, **dict.fromkeys(options, "argument")}
        return dataclasses.replace(model, **changed)
    if data is None:
        raise ConfigError("data is missing: expected a Dataset, as gradstream.from_arrays makes one")
    return Job(model, cast(Dataset, data), **options)


def build_model(job: Job, rank: int = 0) -> Model:
    """The job's model on its device; calls the job's function if the job has one instead of a model.

    Args:
        job: the job of the run.
        rank: rank of the worker that computes with the model.

    Raises:
        ConfigError: the function did not return a model, or the model cannot be moved to the device.
    """
    model = job.model
    if not hasattr(model, "gradient") and callable(model):
        model = model()
    if not hasattr(model, "gradient"):
        raise ConfigError(
            f"model is {type(job.model).__name__}; expected a Model, or a function that makes one: "
            "wrap yours with gradstream.from_functions or gradstream.from_torch"
        )
    if job.device != "cpu" and isinstance(model, TorchModel):
        return on_device(model, job.device, rank)
    if job.device not in ("cpu", "auto"):
        raise ConfigError(
            f"device={job.device!r}: a {type(model).__name__} computes where it likes, and gradstream cannot "
            "move it; leave device out, or bring the model as gradstream.from_torch"
        )
    return cast(Model, model)


def spread_out(job: Job, origin: str) -> Job:
    """The job with the `chunk_elems` that suits a network; keeps a value that the user has set.

    Args:
        job: of a run whose nodes are not all on one machine, or of a simulated run.
        origin: who chose the value, in a word, for `Job.origins`.
    """
    if job.chunk_elems is not None:
        return job
    origins = {**job.origins, "chunk_elems": origin}
    return dataclasses.replace(job, chunk_elems=CHUNK_ELEMS, origins=origins)


class OwnData(Protocol):
    """Takes the place of a data set in a job where every worker's loop brings its own data.

    Attributes:
        optimizer: the update rule that the loop asks for; "" if the job names it.
        averages_gradients: whether loops exchange only gradients, of which the strategy gives every worker the mean.
    """

    optimizer: str
    averages_gradients: bool

    def loop(self, rank: int) -> Any:
        """The loop of a worker, a `gradstream.worker.loop.Loop`."""


def is_open_ended(job: Job) -> bool:
    """Whether the user's own training loops bring the data, of an unknown amount."""
    return hasattr(job.data, "loop")


AMONG = "workers average their gradients among themselves, under 'synchronous' and 'allreduce' alike"
"""What a run of the user's own loops says first under these strategies: see `strategy_of`."""


def strategy_of(job: Job) -> Strategy:
    """The strategy by which the workers of a job exchange.

    Servers that give nothing but the mean of the gradients would hold no state under the user's own loops, so there the
    workers sum up that mean among themselves. With `servers=0` it is the form of the strategy without servers, if any.

    Raises:
        UnknownNameError, ConfigError: as `find_strategy`.
    """
    found = find_strategy(job.strategy, job.strategy_options)
    if not isinstance(found, ServerStrategy):
        return found
    if is_open_ended(job) and found.gives_mean and found.rows(tables=True) is None:
        return find_strategy("allreduce", {"overlap": getattr(found, "overlap", True)})
    return (job.servers == 0 and found.in_group()) or found


def is_script(job: Job) -> bool:
    """Whether the job is a script that calls `gradstream.join()`."""
    return hasattr(job.data, "job")
