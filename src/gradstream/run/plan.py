"""A job becomes a cast: its names found, its data planned, its parts fitted to one another."""

from __future__ import annotations

from gradstream._version import __version__
from gradstream.checkpoint.manifest import Resume
from gradstream.checkpoint.policy import Policy, parse_every
from gradstream.errors import ConfigError
from gradstream.job.job import Job, is_open_ended
from gradstream.job.registry import find_function, find_optimizer, find_strategy, optimizer_of_text
from gradstream.job.validation import check, check_resumed, check_strategy, whole
from gradstream.optim.groups import groups_of
from gradstream.run.nodes import RunPlan
from gradstream.server.chunks import CHUNK_ELEMS
from gradstream.strategies.base import GroupStrategy, ServerStrategy, SharedMemoryStrategy, Strategy
from gradstream.transport.offers import shares_memory
from gradstream.worker.evaluation import EvaluationPlan, Metric
from gradstream.worker.gradient import Clip

__all__ = ["cast_of", "metrics_of", "num_servers", "policy_of"]


def cast_of(job: Job, run_id: str, *, resume: Resume | None = None, keeps: bool = True) -> RunPlan:
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
        check_resumed(job, resume)
    strategy = find_strategy(job.strategy, job.strategy_options)
    optimizer = strategy.optimizer() if job.optimizer is None else find_optimizer(job.optimizer)
    check_strategy(job, strategy, optimizer)
    model = job.model
    cast = RunPlan(
        job=run_id,
        software=__version__,
        strategy=strategy,
        optimizer=optimizer,
        workers=job.workers,
        servers=num_servers(job, strategy),
        batch_size=job.batch_size,
        shares=job.shares,
        assignment=job.assignment,
        groups=groups_of(job.groups, optimizer),
        accumulate=job.accumulate,
        clip=Clip(job.clip_norm, job.clip_value),
        evaluation=EvaluationPlan(job.evaluate_every, metrics_of(job)),
        until=job.until,
        epochs=job.epochs,
        steps=job.steps,
        seed=job.seed,
        chunk_elems=_chunk_elems(job, strategy, resume),
        data=job.data,
        num_parameters=0,  # told by the model that the first worker registers
        reduction=getattr(model, "reduction", "mean"),
        open_ended=is_open_ended(job),
        find_optimizer=optimizer_of_text,
        record=job.record,
        allow_lost=job.allow_lost,
        policy=policy_of(job) if keeps else None,
        resume=resume,
        deadlines=job.deadlines,
    )
    cast.ledger()
    if isinstance(strategy, ServerStrategy):
        strategy.rule(cast.workers, cast.reduction)  # what it raises is said here, and not by a shard's death
    return cast


def _chunk_elems(job: Job, strategy: Strategy, resume: Resume | None) -> int | None:
    """See `RunPlan.chunk_elems`. A checkpoint's versions are those of its chunks, so these stay as they are."""
    if job.chunk_elems is not None:
        return job.chunk_elems
    if resume is not None:
        return int(resume.model["chunk_elems"])
    exchanges = not isinstance(strategy, SharedMemoryStrategy)
    return None if exchanges and shares_memory(job.carrier) else CHUNK_ELEMS


def num_servers(job: Job, strategy: Strategy) -> int:
    """How many shards there are: as many as are asked for, where the strategy has any. Raises ConfigError."""
    name = type(strategy).__name__
    if not isinstance(strategy, ServerStrategy):
        if job.servers:
            how = (
                "in a group of workers"
                if isinstance(strategy, GroupStrategy)
                else "in memory that workers share"
            )
            raise ConfigError(f"servers={job.servers}, but {name} exchanges {how}, without: leave it out")
        return 0
    if job.servers == 0:
        raise ConfigError(f"servers=0: {name} goes through a parameter server; expected at least 1")
    return 1 if job.servers is None else job.servers


def policy_of(job: Job) -> Policy:
    """When a job's checkpoints are made, and which are kept. Raises ConfigError."""
    whole("keep_last", job.keep_last, least=1)
    every = parse_every(job.checkpoint_every)
    if every is not None and every.unit == "epochs" and is_open_ended(job):
        raise ConfigError(
            "checkpoint_every='epoch': a training loop of your own counts its epochs itself; "
            "give a number of steps, or a time such as '10min'"
        )
    return Policy(every=every, keep_last=job.keep_last, keep_best=job.keep_best)


def metrics_of(job: Job) -> dict[str, Metric]:
    """The job's metrics as functions. Raises ConfigError for a place where there is none."""
    return {name: find_function(f) if isinstance(f, str) else f for name, f in job.metrics.items()}
