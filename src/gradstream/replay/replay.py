"""`replay()`: a recorded run done again, update by update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gradstream.checkpoint import Resume
from gradstream.data.joined import ids_of
from gradstream.errors import ConfigError, DivergedError, GradstreamError
from gradstream.job.files import digest_of
from gradstream.job.job import Job, build_model
from gradstream.recording import FOLDER, JOB_FILE, LogPart, differences, origin_of, read_log
from gradstream.replay.cluster import ReplayCluster
from gradstream.replay.update import ReplayedUpdate
from gradstream.run.files import read_record
from gradstream.run.plan import RunPlan, plan_run, shard_name
from gradstream.run.reopen import job_of_run, spec_of_run
from gradstream.run.result import Run
from gradstream.runtime.base import Storage
from gradstream.runtime.storage import DiskStorage, MemoryStorage
from gradstream.worker.evaluation import EvaluationPlan

__all__ = ["Replay", "replay"]


class Replay:
    """A replay under way: an iterator over its updates.

    Args:
        stage: the nodes.
        tree: names of the parameters.
        torn: nodes whose recording was torn at its end, as by a kill.
    """

    def __init__(self, stage: ReplayCluster, model: Any, torn: Sequence[str]) -> None:
        self._stage = stage
        self._model = model
        self._torn = torn
        self._last: Mapping[str, np.ndarray[Any, Any]] | None = None
        self.num_updates = 0
        self.ended = ""

    def __iter__(self) -> Iterator[ReplayedUpdate]:
        return self

    def __next__(self) -> ReplayedUpdate:
        """The next update.

        Raises:
            StopIteration: there is none left; `ended` says why.
            DivergedError: what happens is not what was recorded; says where. Nothing more comes.
        """
        if self.ended:
            raise StopIteration
        update = self._stage.next()
        if update is not None:
            self.num_updates = update.number
            return update
        self.ended = "diverged"
        try:
            self.ended = self._conclusion()
        finally:
            self._last = self._named()
            self._stage.close()
        raise StopIteration

    def _conclusion(self) -> str:
        """Why nothing more comes."""
        stage = self._stage
        diverged = stage.failures.get("")
        if diverged is not None:
            raise diverged
        if not stage.stuck:
            whole = stage.is_whole
            return "the run is over" if whole else f"the recording ends here{self._why_short()}"
        if stage.is_whole and not stage.failures:
            awaited = "; ".join(stage.awaited()[:3])
            raise DivergedError(
                f"after {self.num_updates} updates nothing can happen any more, where {stage.num_left} "
                f"contributions were recorded that did not come: {awaited}"
            )
        return f"the recording ends here{self._why_short()}"

    def _why_short(self) -> str:
        if self._stage.failures:
            name, error = next(iter(self._stage.failures.items()))
            return f": {name} could not go on: {type(error).__name__}: {error}"
        return f": {', '.join(self._torn)} was cut off" if self._torn else ": the run was interrupted"

    @property
    def failures(self) -> Mapping[str, BaseException]:
        """What nodes could not go on with, by name: the error that ended the run, where one did."""
        return {name: error for name, error in self._stage.failures.items() if name}

    @property
    def parameters(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """As they are on the shards now, under the user's own names."""
        return self._named() if self._last is None else self._last

    def _named(self) -> Mapping[str, np.ndarray[Any, Any]]:
        flat = self._stage.parameters()
        return {name: np.array(array) for name, array in self._model.tree(flat).items()}

    def close(self) -> None:
        """Ends it. Idempotent."""
        if not self.ended:
            self.ended = "closed"
            self._last = self._named()
        self._stage.close()

    def __del__(self) -> None:
        """Whoever leaves a loop over it early need not think of `close`."""
        with suppress(Exception):
            self._stage.close()

    def __enter__(self) -> Replay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Found:
    """A recording, and the run that it is of."""

    job: Job
    resume: Resume | None
    parts: Mapping[str, LogPart]
    storage: Storage | None


def replay(
    run: str | Path | Run, *, job: Job | None = None, keep: bool = True, anyway: bool = False
) -> Replay:
    """Repeats a recorded run bit for bit, and gives its updates one after the other.

    All nodes run in this process, on virtual time; each shard takes what comes in the order in which it
    had. So strategies, rules and arithmetic are those of the run, and anything can be looked at between
    two updates. Of a resumed run it is the part that was recorded last, from its checkpoint on.

    Where an event loop is running, as in a notebook, it stands still while an update is computed. Ctrl-C ends
    that with KeyboardInterrupt; the replay can then only be closed.

    Args:
        run: a run directory, or a run; made with `record=True`.
        job: the job, where the run was not made from a file.
        keep: each update has the parameters before and after it: two vectors for each.
        anyway: try it though something is another than it was. Hashes tell where it matters.

    Returns:
        An iterator; its `parameters` are those of the run so far, and in the end those that it ended with.

    Raises:
        ConfigError: nothing was recorded, or the job file, a package or the processor is another: says which.
        DataError: the recording was altered.

    Example:
        >>> for update in replay("runs/20261120-101500-net"):  # doctest: +SKIP
        ...     if not update.finite:
        ...         print(update.worker, update.steps, update.samples, update.staleness)
        ...         break
    """
    found = _in_memory(run, job) if isinstance(run, Run) and run.path is None else _on_disk(run, job)
    _check(found.parts, anyway)
    model = build_model(found.job)
    plan = _plan(found)
    for rank in range(plan.servers):
        if shard_name(rank) not in found.parts:
            raise ConfigError(f"{shard_name(rank)} has recorded nothing: was the run on several machines?")
    stage = ReplayCluster(
        plan, model, found.parts, partial(ids_of, plan.batch_plan()), found.storage, keep=keep
    )
    return Replay(stage, model, [part.node for part in found.parts.values() if part.torn_bytes])


def _on_disk(run: str | Path | Run, job: Job | None) -> _Found:
    path = run.path if isinstance(run, Run) else Path(run)
    assert path is not None
    spec = spec_of_run(path)
    storage = DiskStorage(path)
    parts = _parts(storage, spec.id)
    if not parts:
        raise ConfigError(f"{path} holds no recording: make the run with record=True, or --record")
    told = read_record(path / FOLDER / spec.id / JOB_FILE)
    if job is None and told.get("sha256") and told["sha256"] != digest_of(told.get("job", "")):
        raise ConfigError(
            f"the job file {told['job'].partition(':')[0]} is not what it was when {path} was made: "
            "bring back what it said then, or hand over the job"
        )
    return _Found(job or job_of_run(path), _resume_of(parts), parts, storage)


def _in_memory(run: Run, job: Job | None) -> _Found:
    storage = MemoryStorage()
    storage.files.update(run.recording)
    job = job or run.job
    if not run.recording or job is None:
        raise ConfigError("this run holds no recording: simulate it with record=True")
    parts = _parts(storage, next(iter(run.recording)).split("/")[1])
    if _resume_of(parts) is not None:
        raise ConfigError(
            "this simulation went on from a checkpoint, which it does not hold: simulate it whole"
        )
    return _Found(job, None, parts, None)


def _resume_of(parts: Mapping[str, LogPart]) -> Resume | None:
    """Where the recorded part of a run went on; None where it began."""
    found = next((part.header["resume"] for part in parts.values()), None)
    return None if found is None else Resume.of_json(found)


def _parts(storage: Storage, job: str) -> dict[str, LogPart]:
    folder = f"{FOLDER}/{job}"
    files = [f"{folder}/{name}" for name in storage.names(folder) if name.endswith(".rec")]
    parts = [read_log(storage.read(file), file) for file in files]
    return {part.node: part for part in parts}


def _check(parts: Mapping[str, LogPart], anyway: bool) -> None:
    """Raises ConfigError where the arithmetic is another than it was."""
    for part in parts.values():
        here = origin_of(part.node, "")["arithmetic"]
        other = differences(part.header["arithmetic"], here)
        if other and not anyway:
            raise ConfigError(
                f"{part.node} was recorded with {'; '.join(other)}: bits may differ. Install what was there "
                "then, or try it anyway (anyway=True, --anyway)"
            )
    threads = {part.node: part.header["threads"] for part in parts.values()}
    if len(set(threads.values())) > 1 and not anyway:
        told = ", ".join(f"{node} {count}" for node, count in threads.items())
        raise ConfigError(f"nodes had different numbers of arithmetic threads ({told}): bits may differ")


def _plan(found: _Found) -> RunPlan:
    """The plan of the run, without its evaluations."""
    try:
        plan = plan_run(found.job, "replay", resume=found.resume, keeps=False)
    except GradstreamError as error:
        raise ConfigError(f"the job of this run cannot be made any more: {error}") from error
    return replace(plan, evaluation=EvaluationPlan())
