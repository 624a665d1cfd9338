"""Checks a job before anything is started."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Container, Mapping, Sequence
from typing import Any, cast, get_args

from gradstream.checkpoint.manifest import Resume
from gradstream.codec.base import Codec
from gradstream.codec.casts import DTYPES
from gradstream.codec.low_rank import PowerSGD
from gradstream.codec.named import PARAMETER_CODECS
from gradstream.coordinator.stopping import Until
from gradstream.data.shares import MEASURED
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.callbacks import check_callbacks
from gradstream.job.descriptions import plain
from gradstream.job.job import Job, Pipeline, build_model, is_open_ended
from gradstream.job.traits import traits_of
from gradstream.model.devices import device_of
from gradstream.optim.base import Optimizer
from gradstream.optim.merge import Outer
from gradstream.sparse.updates import check_compiler
from gradstream.strategies.base import ServerStrategy, SharedMemoryStrategy, Strategy
from gradstream.traits import refuse
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
        build_model(job)  # raises if the model cannot be moved to the device
    _check_evaluation(job)
    check_callbacks(job.callbacks)


_NAMES: Mapping[str, Sequence[str]] = {
    "non_finite": ("skip", "error"),
    "acknowledge": ("applied", "logged", "replicated"),
    "pipeline": get_args(Pipeline),
    "pipeline_dtype": tuple(DTYPES),
}
"""Options that are one of a few names, unless they are an object or None."""


def _check_numbers(job: Job) -> None:
    for name, names in _NAMES.items():
        if isinstance(value := getattr(job, name), str | int) and value not in names:
            raise UnknownNameError(name, str(value), names)
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
    if job.fetch_codec not in (None, *PARAMETER_CODECS):
        raise ConfigError(
            f"fetch_codec={job.fetch_codec!r}: expected {', '.join(PARAMETER_CODECS)}; what leaves numbers out, or has "
            "random ones, fits no parameters; leave fetch_codec out"
        )
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
    if every not in (None, "epoch"):
        whole("evaluate_every", every, least=1, other=", or 'epoch'")


def check_strategy(
    job: Job, strategy: Strategy, optimizer: Optimizer, codec: Codec | PowerSGD | None
) -> None:
    """Raises ConfigError if a strategy does not support another argument of the job, or its class is wrong."""
    if not isinstance(strategy, ServerStrategy):
        called = [f"{name}()" for name in _HOOKS_OF_SERVERS if hasattr(strategy, name)]
        if called:
            raise ConfigError(
                f"{type(strategy).__name__} has {', '.join(called)}, which only servers call, but the strategy has no "
                "servers: leave this method out, or derive from gradstream.strategies.ServerStrategy"
            )
    elif strategy.pushes != "gradients":
        Outer(strategy.outer_optimizer(optimizer))
    if isinstance(strategy, SharedMemoryStrategy):
        check_compiler(f"what {type(strategy).__name__} does to shared memory")
    refuse(traits_of(job, strategy, optimizer, codec))


_HOOKS_OF_SERVERS = ("rule", "quorum", "correction", "outer_optimizer")


def check_micro_batches(job: Job, sizes: Sequence[int]) -> None:
    """Raises ConfigError if a minibatch has fewer samples than pieces; `sizes` are the workers' minibatch sizes."""
    if min(sizes, default=math.inf) < job.micro_batches:
        raise ConfigError(
            f"micro_batches={job.micro_batches} of a minibatch of {min(sizes)} samples: expected at most as many"
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


# Fields that the user's own training loop decides.
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


def check_script(job: Job, given: Container[str] = ()) -> None:
    """Raises ConfigError if a field is set, or given with its default, that the script's own loop decides."""
    defaults = {entry.name: entry for entry in dataclasses.fields(Job)}
    for name in _OF_THE_LOOP:
        entry, value = defaults[name], getattr(job, name)
        made = entry.default_factory() if entry.default_factory is not dataclasses.MISSING else entry.default
        if name in given or plain(value) != plain(made):
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
