"""Checks a job before anything is started."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, cast

from gradstream.checkpoint.manifest import Resume
from gradstream.coordinator.stopping import Until
from gradstream.data.shares import MEASURED
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.callbacks import check_callbacks
from gradstream.job.descriptions import plain
from gradstream.job.job import Job, build_model, is_open_ended
from gradstream.job.registry import name_of
from gradstream.model.devices import device_of
from gradstream.optim import SGD
from gradstream.optim.base import ByShape, Optimizer, PerMatrix
from gradstream.optim.merge import Outer
from gradstream.pipeline.schedule import STREAMING
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.sparse.updates import check_compiler
from gradstream.strategies.base import (
    GroupStrategy,
    PeerStrategy,
    ServerStrategy,
    SharedMemoryStrategy,
    Strategy,
)
from gradstream.transport.offers import CHOICES
from gradstream.untrusted.text import check_name
from gradstream.wire.chunks import ChunkMap


def check(job: Job) -> None:
    """Checks the arguments of a job.

    Raises:
        ConfigError: an argument is wrong; the message has its name, its value, and the values expected.
    """
    if not any(hasattr(job.data, name) for name in ("batch", "feed", "loop")) or not hasattr(
        job.data, "num_samples"
    ):
        raise ConfigError(
            f"data is {type(job.data).__name__}; expected a Dataset, or a pair of arrays (inputs, targets): "
            "wrap yours with gradstream.from_arrays, from_dataset, from_loader or from_stream"
        )
    if hasattr(job.model, "state_dict"):
        raise ConfigError(
            f"model is a torch module, {type(job.model).__name__}; expected a function that builds it, and a "
            "loss: gradstream.from_torch(build, loss)"
        )
    if job.name is not None:
        check_name(job.name, "name, or else that of the job file,")
    _check_numbers(job)
    if not is_open_ended(job):
        _check_length(job)
    if isinstance(job.shares, str) and job.shares != MEASURED:
        raise ConfigError(f"shares={job.shares!r}: expected a number for each worker, or {MEASURED!r}")
    if job.assignment not in (None, "queue", "partitions"):
        raise ConfigError(f"assignment={job.assignment!r}: expected 'queue' or 'partitions'")
    if job.carrier not in CHOICES:
        raise ConfigError(f"carrier={job.carrier!r}: expected one of {', '.join(CHOICES)}")
    device_of(job.device)
    if job.device != "cpu" and hasattr(job.model, "gradient"):
        build_model(job)  # raises where the model cannot be moved to the device
    _check_evaluation(job)
    check_callbacks(job.callbacks)


def _check_numbers(job: Job) -> None:
    if job.non_finite not in ("skip", "error"):
        raise UnknownNameError("non_finite", str(job.non_finite), ("skip", "error"))
    if job.acknowledge not in (levels := ("applied", "logged", "replicated")):
        raise UnknownNameError("acknowledge", str(job.acknowledge), levels)
    for name in ("workers", "accumulate", "connections", "quarantine_after", "split", "micro_batches"):
        whole(name, getattr(job, name), least=1)
    if job.servers is not None:
        whole("servers", job.servers, least=0)
    whole("seed", job.seed, least=0)
    if job.chunk_elems is not None:
        whole("chunk_elems", job.chunk_elems, least=1)
        ChunkMap(0, job.chunk_elems, 1)
    for entry in dataclasses.fields(job.deadlines):
        seconds = getattr(job.deadlines, entry.name)
        if not _is_positive(seconds):
            raise ConfigError(f"deadlines.{entry.name} = {seconds!r}: expected a positive number of seconds")
    for name in ("clip_norm", "clip_value"):
        bound = getattr(job, name)
        if bound is not None and not _is_positive(bound):
            raise ConfigError(f"{name}={bound!r}: expected a finite number > 0, or None for no clipping")


def _check_length(job: Job) -> None:
    if (job.epochs is None) == (job.steps is None):
        got = "neither" if job.epochs is None else f"epochs={job.epochs} and steps={job.steps}"
        raise ConfigError(
            f"expected exactly one of epochs and steps, got {got}: epochs=5, for example, or --epochs 5"
        )
    limit = "steps" if job.epochs is None else "epochs"
    whole(limit, getattr(job, limit), least=1)
    if job.data.num_samples is not None and job.workers > job.data.num_samples:
        raise ConfigError(
            f"workers={job.workers}, but {job.data.name!r} has {job.data.num_samples} samples: "
            "each worker needs at least one"
        )


def _check_evaluation(job: Job) -> None:
    every = job.evaluate_every
    if job.until is not None and not isinstance(job.until, Until):
        raise ConfigError(f"until={job.until!r}: expected gradstream.until(accuracy=0.9), for example")
    figures = ["accuracy", "test_loss", *job.metrics]
    if job.until is not None and job.until.monitors not in ("", *figures):
        raise UnknownNameError("figure of evaluations, until(monitor=…)", job.until.monitors, figures)
    if every is None:
        for name, value in job.until.evaluated.items() if job.until is not None else ():
            raise ConfigError(
                f"until({name}={value}) needs evaluations during the run; give evaluate_every, "
                "evaluate_every='epoch' for example"
            )
        return
    if every != "epoch":
        whole("evaluate_every", every, least=1, other=", or 'epoch'")
    if not job.data.num_test_samples:
        raise ConfigError(
            f"evaluate_every={every!r}, but the data set {job.data.name!r} has no held-out samples; give it some "
            "(test_inputs and test_targets of gradstream.from_arrays)"
        )


def check_strategy(job: Job, strategy: Strategy, optimizer: Optimizer) -> None:
    """Raises ConfigError if a strategy does not support another argument of the job."""
    _check_quorum(job, strategy)
    if job.assignment is not None and strategy.partitioning == "rounds":
        raise ConfigError(
            f"assignment={job.assignment!r}: the workers of {type(strategy).__name__} go through rounds "
            "together; leave assignment out, or take another strategy"
        )
    if job.record:
        _check_recorded(job, strategy)
    if job.acknowledge != "applied":
        _check_acknowledged(job, strategy)
    _check_hooks(strategy)
    _check_drive(job, strategy)
    if isinstance(strategy, ServerStrategy) and strategy.pushes != "gradients":
        Outer(strategy.outer_optimizer(optimizer))
    if strategy.in_passes:
        _check_passes(job, strategy, optimizer)
    if isinstance(strategy, SharedMemoryStrategy):
        _check_shared(job, strategy, optimizer)
    if strategy.trains_locally:
        _check_local_steps(job, strategy)
    if isinstance(optimizer, ByShape):
        _check_whole_tensors(job, strategy, optimizer)
    if job.noise_scale:
        _check_noise_scale(job, strategy)


def _check_noise_scale(job: Job, strategy: Strategy) -> None:
    """Raises where a node does not have the mean gradients of all workers at the same parameters."""
    name, bound = type(strategy).__name__, "clip_value" if job.clip_norm is None else "clip_norm"
    served = strategy if isinstance(strategy, ServerStrategy) else None
    in_rounds = isinstance(strategy, GroupStrategy) or (
        served is not None and getattr(served.rule(job.workers, "mean"), "by_round", False)
    )
    if is_open_ended(job):
        why = (
            "in a training loop of your own gradients may be scaled, clipped and summed before gradstream gets them; "
            "leave noise_scale out, or pass a model and data to train()"
        )
    elif not in_rounds:
        why = (
            f"the gradients of {name} are computed on different parameters, and their differences are no noise: the "
            "value would be wrong; take strategy='synchronous' or 'allreduce'"
        )
    elif not strategy.gives_mean or bool(getattr(strategy, "worker_momentum", 0)):
        why = (
            f"{name} does not join the gradients of all workers to their mean; leave backup, aggregate and "
            "worker_momentum out"
        )
    elif served is not None and served.rows(True) is not None:
        why = "of rows alone no node has whole gradients; leave sparse out"
    elif job.clip_norm is not None or job.clip_value is not None:
        why = f"clipped gradients have another mean and other noise; leave {bound} out"
    elif job.pipeline in STREAMING or isinstance(job.pipeline, SyntheticGradients):
        why = f"pipeline={job.pipeline!r} computes gradients on older parameters; take pipeline='1f1b'"
    else:
        return
    raise ConfigError(f"noise_scale=True: {why}")


def _check_local_steps(job: Job, strategy: Strategy) -> None:
    """Raises where workers cannot train alone between two exchanges without servers."""
    name = type(strategy).__name__
    if is_open_ended(job):
        delay = getattr(strategy, "delay", 0)
        if not delay:
            return
        why = f"delay={delay}: a training loop of your own waits for each exchange; leave delay out"
    elif job.accumulate > 1:
        why = (
            f"accumulate={job.accumulate}: workers train alone for every={strategy.local_steps} minibatches; set every "
            "in its place, and leave out variance_test and noise_multiple, which need accumulate"
        )
    elif job.split > 1:
        why = f"split={job.split}: parts of a model compute one gradient together; take strategy='diloco'"
    elif isinstance(strategy, PeerStrategy) and job.shares == MEASURED:
        why = (
            f"shares={MEASURED!r} are those of rounds that all workers go through together; leave shares out, or take "
            "strategy='local-sgd'"
        )
    else:
        return
    raise ConfigError(f"strategy={name}: {why}")


def _check_whole_tensors(job: Job, strategy: Strategy, optimizer: ByShape) -> None:
    """Raises where an update rule that needs whole tensors, or their norms, cannot have them."""
    name = type(optimizer).__name__
    matrices = isinstance(optimizer, PerMatrix)
    if isinstance(strategy, GroupStrategy) and strategy.sharded and matrices:
        why = f"sharded=True gives each worker slices of matrices, and {name} needs whole ones; leave sharded out"
    elif not isinstance(strategy, ServerStrategy) or strategy.pushes != "gradients":
        return  # workers have whole tensors, or add up their norms
    elif matrices:
        why = f"its shards have chunks of matrices, and {name} needs whole ones; take strategy='allreduce'"
    elif not getattr(strategy.rule(job.workers, "mean"), "by_round", False):
        why = (
            f"its shards update each chunk of a tensor with other pushes, at other times, and {name} needs the norm of "
            "one gradient of the whole tensor; take strategy='synchronous' or 'allreduce', or a rule for single "
            "elements, such as SGD or AdamW"
        )
    elif strategy.correction() is not None:
        why = "it corrects pushes by what each worker has read; take strategy='synchronous' or 'allreduce'"
    elif job.record:
        why = "record=True: a replay applies chunk by chunk, without the norms of whole tensors; leave record out"
    elif job.acknowledge != "applied":
        why = f"acknowledge={job.acknowledge!r}: no backup has the norms of an update; leave acknowledge out"
    else:
        return
    raise ConfigError(f"{type(strategy).__name__} with the update rule {name}: {why}")


def _check_quorum(job: Job, strategy: Strategy) -> None:
    if not isinstance(strategy, ServerStrategy) or strategy.quorum(job.workers) is None:
        return
    aggregate = getattr(strategy, "aggregate", "mean")
    if aggregate != "mean":
        if is_open_ended(job) or job.record or job.shares == MEASURED:
            option = "record=True" if job.record else f"shares={job.shares!r}"
            raise ConfigError(
                f"aggregate={aggregate!r} weighs whole contributions, which does not go together with "
                f"{'a training loop of your own' if is_open_ended(job) else option}; leave one of the two out"
            )
        return
    what = f"the {name_of(strategy)} strategy with backup workers"
    if is_open_ended(job):
        raise ConfigError(
            f"{what} makes a late worker skip minibatches, which a training loop of your own cannot: "
            "leave out backup"
        )
    if job.shares == MEASURED:
        raise ConfigError(
            f"shares={MEASURED!r} needs the speed of every worker in each round, but {what} does not wait for "
            "every worker: leave out shares, or leave out backup"
        )
    for given, amounts in (("batch_size", job.batch_size), ("shares", job.shares)):
        if isinstance(amounts, Sequence) and 0 in amounts:
            raise ConfigError(
                f"{given}={list(amounts)}: {what} does not wait for the slowest workers, and a worker without samples "
                "would always be among the fastest: give each worker some samples, or leave out backup"
            )


def _check_recorded(job: Job, strategy: Strategy) -> None:
    name = strategy.title or type(strategy).__name__
    if isinstance(strategy, GroupStrategy | PeerStrategy):
        why = f"{name} has no server whose order could differ: the same seed repeats it"
    elif isinstance(strategy, SharedMemoryStrategy):
        why = f"{name} has no order: workers write the same memory at once"
    elif is_open_ended(job):
        why = "the gradients of a training loop of your own cannot be computed again without it"
    elif job.shares == MEASURED and strategy.partitioning == "rounds":
        why = f"shares={MEASURED!r} follow the clock, which a replay does not have"
    else:
        return
    raise ConfigError(f"record=True: {why}; leave record out")


def _check_acknowledged(job: Job, strategy: Strategy) -> None:
    """Raises where no backup of a shard has all that a new process of it would need."""
    name = strategy.title or type(strategy).__name__
    if not isinstance(strategy, ServerStrategy):
        why = f"{name} has no servers that could acknowledge anything"
    elif strategy.quorum(job.workers) is not None:
        why = "a quorum decides over all shards at once which pushes count, and no backup has its decisions"
    elif strategy.correction() is not None:
        why = f"{name} corrects pushes by what each worker has read, which no backup has"
    elif job.record:
        why = "a recording has one file for each shard, from its first push on"
    else:
        return
    raise ConfigError(f"acknowledge={job.acknowledge!r}: {why}; leave acknowledge out")


def _check_passes(job: Job, strategy: Strategy, optimizer: Optimizer) -> None:
    """Raises where a data epoch cannot be a pass, whose portions any worker may compute."""
    name = strategy.title or type(strategy).__name__
    if optimizer != (own := strategy.optimizer()):
        given = "lr" if type(optimizer) is type(own) else "optimizer"
        shown = optimizer.lr if given == "lr" else optimizer
        raise ConfigError(
            f"{given}={shown}: {name} makes its own steps from the gradient of all samples; leave {given} out; the "
            "strategy has an lr of its own, and weight decay is a term of the loss"
        )
    if job.epochs == 1:
        raise ConfigError(
            f"epochs=1 with {name}: the first pass over the data has the loss and the gradient where the method "
            "begins, and each trial of a step takes another one; expected at least 2"
        )
    if is_open_ended(job):
        why = "the training loop is your own, and nobody else can compute its portions"
    elif job.data.num_samples is None:
        why = "the data is a stream, which has no pass"
    elif job.assignment == "partitions":
        why = 'assignment="partitions" gives each worker its part of the data, but portions go to whoever is idle'
    elif job.groups:
        why = "parameter groups have rates and weight decay of their own, which a batch method does not apply"
    elif job.clip_norm is not None or job.clip_value is not None:
        bound = "clip_value" if job.clip_norm is None else "clip_norm"
        why = f"{bound} would clip each portion, and the sum of clipped portions is the gradient of no loss"
    elif job.split > 1:
        why = f"split={job.split} gives each part of the model its own shards, and a dot product needs all of them"
    elif job.record:
        why = "a recording does not have the commands of a batch method"
    elif job.noise_scale:
        why = "noise_scale=True measures the gradients of minibatches, of which a batch method makes no step"
    elif job.codec is not None:
        why = f"codec={job.codec!r} changes what is sent, and a line search needs the exact sum over all samples"
    else:
        return
    raise ConfigError(f"strategy={name}: {why}; leave one of the two out")


def _check_hooks(strategy: Strategy) -> None:
    """Raises where a class without servers has hooks that only servers would call."""
    if isinstance(strategy, ServerStrategy):
        return
    called = [name for name in _HOOKS_OF_SERVERS if hasattr(strategy, name)]
    if called:
        raise ConfigError(
            f"{type(strategy).__name__} has {', '.join(f'{name}()' for name in called)}, which only servers call, but "
            "the strategy has no servers: leave this method out, or derive from "
            "gradstream.strategies.ServerStrategy"
        )


_HOOKS_OF_SERVERS = ("rule", "quorum", "correction", "outer_optimizer", "drive")


def _check_drive(job: Job, strategy: Strategy) -> None:
    if not isinstance(strategy, ServerStrategy) or not strategy.drives():
        return
    name = type(strategy).__name__
    if strategy.partitioning == "rounds":
        raise ConfigError(
            f"{name} has a drive(), and its workers go through rounds together: a worker that is paused would "
            'be missing in each; expected partitioning = "queue"'
        )
    if is_open_ended(job):
        raise ConfigError(
            f"{name} pauses workers for a while, and others take their minibatches, but each training loop of "
            "your own brings its own data; leave out warm starts and waves"
        )


def _check_shared(job: Job, strategy: Strategy, optimizer: Optimizer) -> None:
    """Raises ConfigError if a vector that workers write without locks does not support the job."""
    name = type(strategy).__name__
    check_compiler(f"what {name} does to shared memory")
    if is_open_ended(job):
        raise ConfigError(
            f"{name} does not support a training loop of your own: pass a model and data to train(), or take "
            "another strategy"
        )
    if not isinstance(optimizer, SGD) or optimizer.state_names or optimizer.weight_decay or job.groups:
        raise ConfigError(
            f"{name} adds -lr·gradient to single components, and has no state of them: got {optimizer}"
            f"{' and groups' if job.groups else ''}; expected gradstream.optim.SGD(lr), without momentum, decay or "
            "groups (sparse models have l2=)"
        )


def check_resumed(job: Job, resume: Resume) -> None:
    """Raises ConfigError if seed or data changed, and with them the order of the samples."""
    for name, got, expected in (
        ("seed", job.seed, resume.seed),
        ("samples of the data", job.data.num_samples, resume.num_samples),
    ):
        if got != expected:
            raise ConfigError(
                f"{name}={got}, but the run of the checkpoint {resume.folder} had {expected}; expected {expected}"
            )


def check_phases(job: Job) -> None:
    """Raises ConfigError if a job with phases has something that no run of phases can do."""
    if is_open_ended(job):
        raise ConfigError(
            "phases with a training loop of your own, which makes its steps itself; leave phases out, or pass a model "
            "and data to train()"
        )
    if job.epochs is not None or job.steps is not None:
        name = "epochs" if job.steps is None else "steps"
        raise ConfigError(
            f"{name}={getattr(job, name)} with phases, each of which has its own length; leave {name} out"
        )
    if job.split > 1:
        raise ConfigError(
            f"split={job.split} with phases, which split models do not have yet; leave one of the two out"
        )
    inside = [one for one in job.phases if one.steps or one.until or one.variance_test or one.noise_multiple]
    if job.data.num_samples is None and inside:
        raise ConfigError(
            f"the data {job.data.name!r} is a stream, which begins a data epoch anew after a boundary inside of it; "
            "give all phases in epochs, without until, variance_test and noise_multiple"
        )
    if job.record:
        raise ConfigError(
            "record=True with phases: a replay goes through one plan of the run; leave one of the two out"
        )


# Fields that a training loop of the user's own decides by itself.
_OF_THE_LOOP = (
    "optimizer",
    "groups",
    "batch_size",
    "shares",
    "assignment",
    "accumulate",
    "clip_norm",
    "clip_value",
    "device",
    "epochs",
    "steps",
    "evaluate_every",
    "metrics",
)


def check_script(job: Job) -> None:
    """Raises ConfigError if a field is given that the script's own loop decides."""
    defaults = {entry.name: entry for entry in dataclasses.fields(Job)}
    for name in _OF_THE_LOOP:
        entry, value = defaults[name], getattr(job, name)
        made = entry.default_factory() if entry.default_factory is not dataclasses.MISSING else entry.default
        if plain(value) != plain(made):
            raise ConfigError(
                f"{name}={value!r}: this script has a training loop of its own; change it there"
            )


def _is_positive(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(cast(float, value)) and cast(float, value) > 0


def whole(name: str, value: object, *, least: int, other: str = "") -> None:
    """Raises ConfigError for a value that is not an integer >= `least`; `other` adds alternatives to the message."""
    try:
        number = operator.index(cast(Any, value))
    except TypeError:
        raise ConfigError(f"{name}={value!r}: expected a whole number{other}") from None
    if isinstance(value, bool) or number < least:
        raise ConfigError(f"{name}={value!r}: expected at least {least}")
