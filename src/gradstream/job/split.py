"""Refuses what a split model does not support yet, before anything is started."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import get_args

from gradstream.codec.casts import DTYPES
from gradstream.data.shares import MEASURED
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.job import Job, Pipeline, is_open_ended
from gradstream.model.torch_module import TorchModel
from gradstream.optim.base import Optimizer
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.schedule import STREAMING
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.strategies.base import GroupStrategy, ServerStrategy, SharedMemoryStrategy, Strategy


def check_split(job: Job, strategy: Strategy, optimizer: Optimizer) -> None:
    """Raises ConfigError if a job asks for a split model, or for a pipeline of one, that cannot be."""
    schedules = get_args(Pipeline)
    if isinstance(job.pipeline, str) and job.pipeline not in schedules:
        raise UnknownNameError("pipeline", str(job.pipeline), schedules)
    if job.pipeline_dtype not in (None, *DTYPES):
        raise UnknownNameError("pipeline_dtype", str(job.pipeline_dtype), [*DTYPES])
    if job.split == 1:
        if not isinstance(job.pipeline, str):
            raise ConfigError(f"pipeline={job.pipeline} without split: expected split=2 or more, the parts")
        if job.pipeline != Job.pipeline:  # the default, which may have been asked for too: nobody can tell
            raise ConfigError(f"pipeline={job.pipeline!r} without split: expected split=2 or more, the parts")
        if job.micro_batches > 1:
            raise ConfigError(
                f"micro_batches={job.micro_batches} without split: they are the pieces of a minibatch that go through "
                "the parts of a split model; accumulate= sums gradients of several minibatches in one process"
            )
        if job.recompute:
            raise ConfigError(
                "recompute=True without split: it is for the parts of a split model; in one process, call "
                "torch.utils.checkpoint in the module"
            )
        if job.pipeline_dtype is not None:
            raise ConfigError(f"pipeline_dtype={job.pipeline_dtype!r} without split: no activations travel")
        return
    for what in _unsupported(job, strategy):
        raise ConfigError(f"split={job.split} with {what}")
    for what in _unsupported_in_streams(job, strategy) if job.pipeline in STREAMING else ():
        raise ConfigError(f"pipeline={job.pipeline!r} with {what}; or take pipeline='1f1b'")


def check_micro_batches(job: Job, sizes: Sequence[int]) -> None:
    """Raises ConfigError if a minibatch has fewer samples than it is to have pieces; `sizes` are those of workers."""
    if min(sizes, default=math.inf) < job.micro_batches:
        raise ConfigError(
            f"micro_batches={job.micro_batches} of a minibatch of {min(sizes)} samples: expected at most as many"
        )


def _unsupported(job: Job, strategy: Strategy) -> Iterator[str]:
    """What a split model cannot be combined with, and what to do instead."""
    if is_open_ended(job):
        yield "a training loop of your own: leave split out, and call session.split in the script"
    if not isinstance(job.model, TorchModel) and not callable(job.model):
        yield (
            f"a {type(job.model).__name__}: only a module or a list of layers can be divided; make the model with "
            "gradstream.from_torch or gradstream.model.from_layers"
        )
    if job.data.num_samples is None:
        yield "a stream: its minibatches have no size that all parts know; give the samples as arrays or a dataset"
    apart, named = isinstance(job.pipeline, SyntheticGradients), f"pipeline={job.pipeline}"
    scheduled = isinstance(job.pipeline, str)
    for asked, what in (
        (
            job.recompute and not scheduled,
            f"recompute=True, and pipeline={job.pipeline}: activations of one minibatch are all that it keeps; "
            "leave recompute out",
        ),
        (
            job.pipeline_dtype is not None and not scheduled,
            f"pipeline_dtype={job.pipeline_dtype!r}, and pipeline={job.pipeline}: only schedules of micro-batches "
            "know it; leave it out",
        ),
        (
            job.recompute and job.pipeline == "delayed",
            "recompute=True, and pipeline='delayed': a backward pass needs activations of older weights, which no "
            "part has any more; take pipeline='2bw' or '1f1b'",
        ),
        (job.record, "record=True: a replay knows no parts; leave record out"),
        (job.accumulate > 1, f"accumulate={job.accumulate}; take micro_batches={job.accumulate}"),
        (job.shares == MEASURED, "shares='measured': parts do not hear of new sizes; leave shares out"),
        (
            isinstance(job.pipeline, Hybrid) and job.micro_batches > 1,
            f"a hybrid, and micro_batches={job.micro_batches}: its parts divide the minibatch; leave it out",
        ),
        (apart and job.micro_batches > 1, f"{named}, and micro_batches={job.micro_batches}: leave it out"),
        (
            apart and job.clip_norm is not None,
            f"{named}, and clip_norm={job.clip_norm}: no part knows the length of the whole gradient; take clip_value",
        ),
        (job.device != "cpu", f"device={job.device!r}: parts compute on the CPU only; leave device out"),
    ):
        if asked:
            yield what
    yield from _unsupported_strategies(job, strategy)


def _unsupported_strategies(job: Job, strategy: Strategy) -> Iterator[str]:
    name = type(strategy).__name__
    if isinstance(strategy, SharedMemoryStrategy):
        yield f"{name}: its workers share one vector of the whole model; take strategy='downpour'"
    if isinstance(strategy, GroupStrategy) and strategy.factors:
        yield "factors=True: parts exchange whole gradients; leave factors out"
    if isinstance(strategy, ServerStrategy):
        if strategy.quorum(job.workers) is not None:
            yield f"a quorum of {name}: parts could leave out different workers; take all of them"
        if strategy.rows(False) is not None:
            yield f"{name}, which exchanges rows; take another strategy"
        if strategy.fewest_chunks > 1:
            yield (
                f"{name} of {strategy.fewest_chunks} fragments: each part would cut its own, so the run would differ "
                "from that of the whole model; take fragments=1, or strategy='async-diloco'"
            )


def _unsupported_in_streams(job: Job, strategy: Strategy) -> Iterator[str]:
    """What cannot be combined with minibatches that begin before the update of those before them."""
    name = type(strategy).__name__
    if not strategy.pipelined:
        yield (
            f"{name}: the age of the weights in a pipeline is unknown to it; take strategy='allreduce', 'synchronous' "
            "or 'downpour'"
        )
    if job.clip_norm is not None:
        yield (
            f"clip_norm={job.clip_norm}: parts make their updates before the length of the whole gradient is known; "
            "take clip_value"
        )
