"""`gradstream.join()`: finds out how this process was started, and who the others are."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradstream.errors import ConfigError
from gradstream.job.files import intercept, script_of_caller
from gradstream.job.job import Deadlines, Job
from gradstream.job.registry import describe, find_strategy
from gradstream.run.result import FINAL_MODEL
from gradstream.session import place, torchrun
from gradstream.session.exits import at_the_end
from gradstream.session.job import OwnLoop, ScriptModel
from gradstream.session.session import LoneSession, Session
from gradstream.session.worker_session import WorkerSession, enter, running
from gradstream.strategies.base import Strategy
from gradstream.untrusted import say

__all__ = ["join"]


def join(
    strategy: str | Strategy = "synchronous",
    *,
    strategy_options: Mapping[str, Any] | None = None,
    exchange: str | None = None,
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
) -> Session:
    """Joins the run that this script was started for, as one of its workers.

    Started by `gradstream train script.py`, it is one of `--workers`; by `torchrun`, one of its
    processes, of which the first runs coordinator and servers (on several machines all need the same
    `GRADSTREAM_TOKEN`); by `python`, it is alone, and nothing is
    started. Where the script has called `init_process_group`, ranks are those of it; it stays the script's.
    A script is run once more up to this call, to see what it asks for: call it early.

    Args:
        strategy, strategy_options, servers, seed, name, run_dir, chunk_elems, checkpoint_every, keep_last,
            trackers, allow_lost, deadlines: as of `Job`. `gradstream train` overrides them by its options.
        exchange: who moves the bytes of a strategy without servers: short for an entry of `strategy_options`;
            see `AllReduce`.
        workers: how many `gradstream train` starts; torchrun and python decide for themselves.

    Raises:
        ConfigError: an argument is wrong, or the environment makes no sense.
        DeadlineError: under torchrun, its first process did not answer.

    Example:
        >>> session = join("downpour")  # doctest: +SKIP
        >>> model, optimizer = session.wrap(model, optimizer)  # doctest: +SKIP
    """
    job = Job(
        ScriptModel(),  # type: ignore[arg-type]  # stand in for model and data
        OwnLoop(),  # type: ignore[arg-type]
        strategy=strategy,
        strategy_options={**(strategy_options or {}), **({"exchange": exchange} if exchange else {})},
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
        deadlines=deadlines or Deadlines(),
    )
    intercept(job)
    if running() is not None:
        raise ConfigError("join() was called before in this process: one script is one worker of one run")
    if not describe(find_strategy(strategy, job.strategy_options))["class"]:
        raise ConfigError(
            "join: the servers do not run this script: name your strategy by place, mine.py:Mine"
        )
    given = place.assigned()
    if given is not None:
        return enter(WorkerSession(given, given.job().seed))
    ranks = torchrun.of_process_group() or torchrun.of_torchrun(os.environ)
    return LoneSession() if ranks is None else enter(_under_torchrun(job, *ranks))


def _script() -> str | None:
    """The file that `gradstream resume` would run, if there is one."""
    try:
        return script_of_caller()
    except ConfigError:
        return None


def _under_torchrun(job: Job, rank: int, size: int) -> WorkerSession:
    """Rank 0 runs coordinator and shards as processes of its own, and tells the others where."""
    job = dataclasses.replace(job, workers=size, spec=_script())
    assignment, host = torchrun.take_part(job, rank, size)
    session = WorkerSession(assignment, job.seed, host)
    run_dir = Path(assignment.spec).parent
    if rank == 0:
        say(f"gradstream: {size} workers by torchrun, coordinator and servers here; {run_dir}")

    def fail(error: BaseException) -> None:
        session.fail(error)
        if rank == 0 and not (run_dir / FINAL_MODEL).is_file():
            say(_left_of(run_dir, resumes=job.spec is not None and session._looked))

    at_the_end(session.finish, fail)
    return session


def _left_of(run_dir: Path, *, resumes: bool) -> str:
    """What is left of a run that has not finished, and how it goes on where it can."""
    folder = place.newest_in(run_dir)
    text = f"gradstream: the run has ended early; {folder or 'no checkpoint'} in {run_dir}"
    if not (folder and resumes):
        return text
    return f"{text}; it goes on, without torchrun: gradstream resume {shlex.quote(str(run_dir))}"
