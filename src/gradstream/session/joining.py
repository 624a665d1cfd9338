"""`gradstream.join()`: determines how this process was started, and joins its run as a worker."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gradstream.codec.base import Codec
from gradstream.codec.low_rank import PowerSGD
from gradstream.errors import ConfigError, Interrupted
from gradstream.job.descriptions import describe
from gradstream.job.files import intercept, script_of_caller
from gradstream.job.job import AMONG, Job, strategy_of
from gradstream.job.phase_jobs import AUTO, measured_first
from gradstream.job.phases import Phase
from gradstream.job.registry import find_strategy
from gradstream.run import placement
from gradstream.run.place import Place, place_of
from gradstream.run.result import FINAL_MODEL
from gradstream.runtime.deadlines import Deadlines
from gradstream.session import torchrun
from gradstream.session.node import STRATEGY, OwnLoop, ScriptModel
from gradstream.session.session import Session, SingleProcessSession
from gradstream.session.worker_session import WorkerSession
from gradstream.strategies.base import ServerStrategy, Strategy
from gradstream.untrusted import say

JOIN_S = 1800.0
"""Default time that workers wait for one another in `wrap`: a script may prepare data for long before it."""


def join(
    strategy: str | Strategy = STRATEGY,
    *,
    strategy_options: Mapping[str, Any] | None = None,
    exchange: str | None = None,
    codec: str | Codec | PowerSGD | None = None,
    workers: int = 2,
    servers: int | None = None,
    seed: int = 0,
    name: str | None = None,
    run_dir: Path | None = None,
    chunk_elems: int | None = None,
    checkpoint_every: int | str | None = "10min",
    keep_last: int = 2,
    trackers: Sequence[str] = (),
    allow_lost: bool = False,
    deadlines: Deadlines | None = None,
    phases: Sequence[Phase] = (),
) -> Session:
    """Joins the run for which this script was started, as one of its workers.

    Under `gradstream train script.py`, this process is one of `--workers`. Under `torchrun`, `srun` or Kubernetes, it
    is one of their processes (see `gradstream.run.place`); the first of them runs coordinator and servers, and on
    several machines all need the same `GRADSTREAM_TOKEN`. Plain `python` is a single process and starts nothing. If
    the script has called `init_process_group`, its process group determines the ranks and is not used otherwise.
    Before the workers start, `gradstream train` runs the script once up to this call to read the arguments: call it
    early.

    The default strategy has no servers, equals one process with the joined minibatch, and goes on when a worker dies.
    "synchronous" is the same here. With `servers=`, name a strategy whose servers hold the parameters.

    Args:
        strategy, strategy_options, codec, servers, seed, name, run_dir, chunk_elems, checkpoint_every, keep_last,
            trackers, allow_lost, deadlines, phases: see `Job`. Options of `gradstream train` override them. By default,
            workers wait for one another in `wrap` for half an hour (`Deadlines(join_s=1800)`).
        exchange: the `exchange` entry of `strategy_options`: which library sends the data of a strategy
            without servers; see `AllReduce`.
        workers: number of workers that `gradstream train` starts. Under torchrun and python it is ignored.

    Raises:
        ConfigError: an argument is wrong, or the environment variables contradict each other.
        DeadlineError: under torchrun, the first process did not answer.

    Example:
        >>> session = join("downpour")  # doctest: +SKIP
        >>> model, optimizer = session.wrap(model, optimizer)  # doctest: +SKIP
    """
    named = find_strategy(strategy, strategy_options) if exchange and strategy != AUTO else None
    if isinstance(named, ServerStrategy):
        raise ConfigError(
            f"join: exchange={exchange!r} with strategy {strategy!r}: it names what moves bytes without servers; "
            "expected strategy='allreduce', which 'synchronous' is in a loop of your own"
        )
    job = Job(
        ScriptModel(),  # type: ignore[arg-type]  # stand in for model and data
        OwnLoop(),  # type: ignore[arg-type]
        strategy=strategy,
        strategy_options={**(strategy_options or {}), **({"exchange": exchange} if exchange else {})},
        codec=codec,
        workers=workers,
        servers=servers,
        seed=seed,
        name=name,
        run_dir=run_dir,
        chunk_elems=chunk_elems,
        checkpoint_every=checkpoint_every,
        keep_last=keep_last,
        trackers=trackers,
        allow_lost=allow_lost,
        deadlines=deadlines or Deadlines(join_s=JOIN_S),
        phases=phases,
    )
    intercept(job)
    if placement.running() is not None:
        raise ConfigError(
            "join: this process has already called join(), and a process is one worker of one run: use the session "
            "that the first call returned"
        )
    job = measured_first(job)
    named_in = [(phase.strategy, phase.strategy_options) for phase in job.phases]
    kinds = [(job.strategy, job.strategy_options), *named_in]
    found = [find_strategy(kind, its) for kind, its in kinds if kind is not None and kind != AUTO]
    if not all(describe(one)["class"] for one in found):
        raise ConfigError(
            "join: the strategy is defined in this script, which the servers do not run: move it to a file of "
            'its own, and name file and class, strategy="mine.py:Mine"'
        )
    assigned = placement.assigned()
    if assigned is not None:
        return placement.enter(WorkerSession(assigned, assigned.job().seed))
    place = torchrun.of_process_group() or place_of(os.environ)
    return SingleProcessSession() if place is None else placement.enter(_under_engine(job, place))


def _script() -> str | None:
    """The script, which `gradstream resume` runs again; None if there is no file."""
    try:
        return script_of_caller()
    except ConfigError:
        return None


def _under_engine(job: Job, place: Place) -> WorkerSession:
    """Makes the session of a process that an engine has started. Rank 0 also starts coordinator and shards."""
    rank, size = place.rank, place.size
    job = dataclasses.replace(job, workers=size, spec=_script())
    assignment, host = torchrun.take_part(job, place)
    session = WorkerSession(assignment, job.seed, host)
    run_dir = Path(assignment.spec).parent
    if rank == 0:
        how = AMONG if strategy_of(job).gives_mean else "coordinator and any servers here"
        say(f"gradstream: {size} workers by {place.engine}, {how}; {run_dir}")

    def fail(error: BaseException) -> None:
        session.fail(error)
        if rank == 0 and not (run_dir / FINAL_MODEL).is_file():
            say(_summary_of(run_dir, resumes=job.spec is not None and session.resumable))

    at_the_end(session.finish, fail)
    return session


def _summary_of(run_dir: Path, *, resumes: bool) -> str:
    """A line about a run that ended early: its checkpoint and, if possible, how to resume it."""
    folder = placement.newest_in(run_dir)
    text = f"gradstream: the run has ended early; {folder or 'no checkpoint'} in {run_dir}"
    if not (folder and resumes):
        return text
    return f"{text}; it goes on by: gradstream resume {shlex.quote(str(run_dir))}"


def at_the_end(close: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
    """Registers `close` for the end of the script, and `fail` for an exception that ends it.

    For scripts that gradstream does not start itself (for the others see `run.placement`). Python joins all threads
    before it calls `atexit` functions, but a session's threads end only when it is closed. So this registers with
    `threading`, as `concurrent.futures` does.
    """
    before = sys.excepthook

    def end() -> None:
        try:
            close()
        except Interrupted:
            pass  # the run was interrupted, which ends the script

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        fail(error)
        before(kind, error, trace)  # last, so that its output stays visible

    sys.excepthook = hook
    threading._register_atexit(end)  # type: ignore[attr-defined]
