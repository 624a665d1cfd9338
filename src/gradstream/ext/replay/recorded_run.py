"""A recorded run in the form that its replay needs: its plan, its model, and the recording of each node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradstream.checkpoint import Resume
from gradstream.errors import ConfigError, GradstreamError
from gradstream.job.files import digest_of
from gradstream.job.job import Job, build_model
from gradstream.job.plan import EvaluationPlan, RunPlan, shard_name, worker_name
from gradstream.model.base import Model
from gradstream.recording import (
    FOLDER,
    JOB_FILE,
    Closed,
    Entry,
    FetchAsked,
    LogPart,
    Pushed,
    differences,
    origin_of,
    read_log,
)
from gradstream.run.files import read_record
from gradstream.run.planning import plan_run
from gradstream.run.result import Run, described, job_of_run
from gradstream.runtime.base import Storage
from gradstream.runtime.storage import DiskStorage, MemoryStorage
from gradstream.wire import v1
from gradstream.wire.chunks import Placement

Parts = Mapping[str, LogPart]
"""The recording of each node, by the node's name."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run and its recording.

    Args:
        plan: plan of the run, without its evaluations.
        model: the model; each worker of a replay gets a copy.
        parts: recording of each node, by name.
        storage: the run directory, which holds the checkpoint of a resumed run; None for a simulation.
    """

    plan: RunPlan
    model: Model
    parts: Parts
    storage: Storage | None

    @property
    def threads(self) -> int:
        """Number of threads that the arithmetic of a node used."""
        return max((int(part.header["threads"]) for part in self.parts.values()), default=1)

    @property
    def is_complete(self) -> bool:
        """Whether every shard has recorded up to the end of the run."""
        return all(
            any(isinstance(entry, Closed) for entry in part.entries[-1:]) for part in self.shard_parts()
        )

    @property
    def cut_off(self) -> list[str]:
        """Names of the nodes whose recording is cut off at its end, for example because they were killed."""
        return [part.node for part in self.parts.values() if part.torn_bytes]

    @property
    def last_worker(self) -> str:
        """The worker that kept the final parameters: the last one that asked shards to apply their sums."""
        asked = [
            entry.rank
            for part in self.shard_parts()
            for entry in part.entries
            if isinstance(entry, FetchAsked)
        ]
        return worker_name(asked[-1]) if asked else ""

    def shard_parts(self) -> Iterator[LogPart]:
        """The recordings of the shards, by rank."""
        return (self.parts[shard_name(rank)] for rank in range(self.plan.servers))

    def entries_of(self, node: str) -> Sequence[Entry]:
        """The entries of a node; none if it has recorded nothing."""
        return self.parts[node].entries if node in self.parts else ()

    def notice(self) -> v1.Notice:
        """The notice of the coordinator when training began.

        The worker of the lowest rank brings the initial parameters. Workers of lower ranks than the one that
        brought them had died by then.
        """
        assigners = {
            entry.rank
            for part in self.parts.values()
            for entry in part.entries
            if isinstance(entry, Pushed) and entry.assign
        }
        shards = [("shard", rank, shard_name(rank)) for rank in range(self.plan.servers)]
        ranks = range(min(assigners, default=0), self.plan.workers)
        nodes = [
            v1.Node(name=name, role=role, rank=rank, address=f"memory:{name}", incarnation=1)
            for role, rank, name in [*shards, *(("worker", rank, worker_name(rank)) for rank in ranks)]
        ]
        return v1.Notice(
            epoch=1,
            status=v1.Notice.TRAINING,
            nodes=nodes,
            placement=Placement(0, self.plan.servers).as_message(),
        )


def load_recorded_run(run: str | Path | Run, job: Job | None, *, anyway: bool) -> RecordedRun:
    """Reads a recording and plans its run again; see `gradstream.ext.replay.replay` for arguments and errors."""
    if isinstance(run, Run) and run.path is None:
        job, parts, storage = _from_memory(run, job)
    else:
        job, parts, storage = _from_disk(run, job)
    if not anyway:
        _check_arithmetic(parts)
    model = build_model(job)
    try:
        plan = plan_run(job, "replay", resume=_resume_of(parts), keeps=False)
    except GradstreamError as error:
        raise ConfigError(f"the job of this run cannot be made any more: {error}") from error
    for rank in range(plan.servers):
        if shard_name(rank) not in parts:
            raise ConfigError(f"{shard_name(rank)} has recorded nothing: was the run on several machines?")
    return RecordedRun(replace(plan, evaluation=EvaluationPlan()), model, parts, storage)


def _from_disk(run: str | Path | Run, job: Job | None) -> tuple[Job, Parts, Storage | None]:
    path = run.path if isinstance(run, Run) else Path(run)
    assert path is not None
    spec = described(path)
    storage = DiskStorage(path)
    parts = _read_parts(storage, spec.id)
    if not parts:
        raise ConfigError(f"{path} holds no recording: make the run with record=True, or --record")
    recorded = read_record(path / FOLDER / spec.id / JOB_FILE)
    if job is None and recorded.get("sha256") and recorded["sha256"] != digest_of(recorded.get("job", "")):
        raise ConfigError(
            f"the job file {recorded['job'].partition(':')[0]} has changed since {path} was made: "
            "restore the file as it was, or pass the job (job=...)"
        )
    return job or job_of_run(path), parts, storage


def _from_memory(run: Run, job: Job | None) -> tuple[Job, Parts, Storage | None]:
    storage = MemoryStorage()
    storage.files.update(run.recording)
    job = job or run.job
    if not run.recording or job is None:
        raise ConfigError("this run holds no recording: simulate it with record=True")
    parts = _read_parts(storage, next(iter(run.recording)).split("/")[1])
    if _resume_of(parts) is not None:
        raise ConfigError(
            "this simulation was resumed from a checkpoint, which it does not hold: simulate it whole"
        )
    return job, parts, None


def _read_parts(storage: Storage, job: str) -> Parts:
    folder = f"{FOLDER}/{job}"
    files = [f"{folder}/{name}" for name in storage.names(folder) if name.endswith(".rec")]
    parts = [read_log(storage.read(file), file) for file in files]
    return {part.node: part for part in parts}


def _resume_of(parts: Parts) -> Resume | None:
    """The checkpoint from which the recorded part of a run was resumed; None for the begin of the run."""
    record = next((part.header["resume"] for part in parts.values()), None)
    return None if record is None else Resume.of_json(record)


def _check_arithmetic(parts: Parts) -> None:
    """Raises ConfigError if results may differ in their bits on this machine."""
    for part in parts.values():
        others = differences(part.header["arithmetic"], origin_of(part.node, "")["arithmetic"])
        if others:
            raise ConfigError(
                f"{part.node} was recorded with {'; '.join(others)}: bits may differ. Install the recorded "
                "versions, or replay it nevertheless (anyway=True, --anyway)"
            )
    threads = {part.node: part.header["threads"] for part in parts.values()}
    if len(set(threads.values())) > 1:
        each = ", ".join(f"{node} {count}" for node, count in threads.items())
        raise ConfigError(
            f"nodes had different numbers of arithmetic threads ({each}): bits may differ. Replay it nevertheless "
            "with anyway=True, --anyway"
        )
