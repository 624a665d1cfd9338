"""`resume()`: continues a run that was stopped or killed from its newest good checkpoint."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from gradstream._train import check_ways, launch
from gradstream.checkpoint import Resume, to_resume
from gradstream.checkpoint.own_state import is_for_any_size, read_loop
from gradstream.data.alike import NUMBER, checks_of, differences
from gradstream.data.download import machine_lock
from gradstream.errors import ConfigError, DataError, UnknownNameError
from gradstream.job.code import COPY, changed, kept_code, users_code
from gradstream.job.job import Job, Pipeline, is_script, spread_out
from gradstream.job.plan import RunPlan, worker_name
from gradstream.job.validation import check_script
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.report.progress_line import shown
from gradstream.run.files import read_record
from gradstream.run.followed_events import OnEvent
from gradstream.run.launcher_lock import holder_of
from gradstream.run.node import LOCK, LOCK_S
from gradstream.run.node_spec import NodeSpec
from gradstream.run.nodes import check_model
from gradstream.run.planning import plan_run
from gradstream.run.remote.listening import Listening
from gradstream.run.result import FINAL_MODEL, Run, described, job_of_run
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.storage import DiskStorage
from gradstream.telemetry.event_lines import EventLines
from gradstream.untrusted import say


class ResumeOptions(TypedDict, total=False):
    """Fields of the job that a resumed run may change. Seed, model, data and code stay as they were."""

    workers: int
    servers: int
    split: int
    micro_batches: int
    pipeline: Pipeline | Hybrid | SyntheticGradients
    recompute: bool
    pipeline_dtype: Literal["float16", "bfloat16"] | None
    batch_size: int | Sequence[int]
    shares: Sequence[float] | Literal["measured"] | None
    assignment: Literal["queue", "partitions"] | None
    epochs: int | None
    steps: int | None
    checkpoint_every: int | str | None
    keep_last: int
    keep_best: bool
    device: str
    allow_lost: bool
    allow_changed: bool
    deadlines: Deadlines


def resume(
    path: str | Path,
    *,
    job: Job | None = None,
    on_event: OnEvent | None = None,
    progress: bool | None = None,
    listen: Listening | None = None,
    from_start: bool = False,
    detach: bool = False,
    **options: Unpack[ResumeOptions],
) -> Run:
    """Continues a run in its own directory, from the newest checkpoint that passes verification.

    A synchronous run ends with the same bytes as an uninterrupted one, even with another number of servers. With
    another number of workers or another batch size, the run continues at the same sample: no sample of the epoch is
    skipped or repeated. An asynchronous run uses every sample once. Without a checkpoint the run starts over, with a
    message. A script with its own training loop runs again from its top, and its loaders continue where they were.

    Args:
        path: the run directory.
        job: the job, if the run was not made from a file (nodes are threads then), or to continue with options that
            differ from the run's; a message names those. None reads the job again as it was.
        on_event, progress: as for `train`.
        listen: how other machines join again; None if there are none.
        from_start: whether to start over even though there are checkpoints, all of them damaged.
        detach: as for `train`.
        options: fields of the job to change: workers, servers, epochs, ...

    Returns:
        The run, with the events of all its parts.

    Raises:
        ConfigError: this is no run directory, a file in it is damaged, nothing is left to do, or code or data have
            changed and `allow_changed` does not allow it. Nothing was started.
        DataError: the run is still going on; or every checkpoint is damaged: the message names each file.
        Interrupted: the run was stopped again.
        GradstreamError: as in `train`.
    """
    path = Path(path).resolve()
    _check_ended(path)
    known = [*ResumeOptions.__annotations__]
    for name in options:
        if name not in known:
            raise UnknownNameError("option that a resumed run can change", name, known)
    is_another = job is not None
    job = dataclasses.replace(job or job_of_run(path), **options, run_dir=path)
    if "epochs" in options or "steps" in options:
        job = dataclasses.replace(job, epochs=options.get("epochs"), steps=options.get("steps"))
    if detach:
        check_ways(job, None, None if job.spec else False, listen, detach, on_event, progress)
    info = read_record(path / "run.json")  # the end of the run adds to it, so refuse a damaged one now
    job = dataclasses.replace(job, name=job.name or info.get("name"))
    if is_script(job):
        check_script(dataclasses.replace(job, optimizer=None), options)  # the spec has filled one in
    _check_unchanged(path, job, is_another=is_another)
    if listen is not None:
        if "workers" not in options:
            total = listen.machines * listen.workers_per_machine
            job = dataclasses.replace(job, workers=max(1, total // job.split))
        listen.check(job, earlier=False)
        job = listen.spread_servers(job)
    with machine_lock(path / LOCK, doing="resuming the run", wait_s=LOCK_S):
        time_s = _mend_events(path / "events.jsonl")
        newest = to_resume(DiskStorage(path), _refused, from_start=from_start)
    any_size = (
        newest is not None
        and is_script(job)
        and is_for_any_size(read_loop(DiskStorage(path), newest[0], "", newest[1].steps))
    )
    if newest is not None and is_script(job) and job.workers != newest[1].workers and not any_size:
        raise ConfigError(
            f"workers={job.workers}, but the run in {path} had {newest[1].workers} workers, and its script has a "
            "training loop of its own, whose workers continue in their own parts of the data: resume it with "
            f"workers={newest[1].workers}. Scripts that take all minibatches from DataLoaders of session.shard and "
            "do not call session.skip may have another number"
        )
    before = job.workers if newest is None else newest[1].workers
    num_lost = before - len(newest[1].steps) if newest is not None and is_script(job) else 0
    if num_lost and not (any_size or job.allow_lost):
        raise ConfigError(
            f"{path} goes on from a checkpoint that was made when {num_lost} of {before} workers were "
            "lost: it does not say where their scripts have to go on, nor which data the others had taken over, "
            "so some data would be left out and some come twice. allow_lost=True, or --allow-lost, accepts that"
        )
    at = None if newest is None else Resume.at(*newest, time_s=time_s)
    if listen is not None and at is None:
        job = spread_out(job, "listen")
    plan = plan_run(job, secrets.token_hex(8), resume=at)
    _check_left(path, plan.ledger().finished)
    check_model(plan)
    has = "no good checkpoint" if from_start else "no checkpoint"
    say(
        f"{path} has {has}: the run begins from the start"
        if at is None
        else f"the run goes on from {at.folder}"
    )
    _say_what_differs(path, plan, is_another=is_another)
    threads = job.spec is None
    with shown(on_event, False if detach else progress) as each:
        return launch(plan, path, on_event=each, as_threads=threads, listening=listen, detach=detach)


def _check_ended(path: Path) -> None:
    """Raises DataError if the run has a launcher."""
    if holder_of(path) is not None:
        raise DataError(
            f"{path} goes on: processes of it are left; `gradstream attach` shows its progress, and `gradstream stop` "
            "ends it"
        )


def _check_unchanged(path: Path, job: Job, *, is_another: bool) -> None:
    """Raises ConfigError if code or data have changed; prints a message instead where that is allowed.

    `is_another`: whether the caller brought the job, whose code may differ.
    """
    before = described(path)
    for part, now, was in differences(checks_of(job.data), before.data):
        what = f"{part} of the data set {job.data.name!r} changed since {path} has begun: from {was} to {now}"
        if not job.allow_changed or part == NUMBER:
            raise ConfigError(
                f"{what}; the run would go on in the middle of other data. Put those of before back, or begin a new "
                f"run. Where they differ from one process to the next: {before.same_data}. Where other samples are "
                "meant, as many: allow_changed=True, --allow-changed"
            )
        say(f"{what}; the run goes on with the data of now")
        break
    edited = ", ".join(map(str, changed(kept_code(path), users_code(job.spec))))
    what = f"edited since {path} has begun: {edited}"
    if not edited:
        return
    if not (job.allow_changed or is_another):
        raise ConfigError(
            f"{what}; the rest of the run would not fit what it has trained so far. Put back what it began with, of "
            f"which {path / COPY} has a copy; or go on with the code of now: allow_changed=True, --allow-changed"
        )
    say(f"{what}; the run goes on with the code of now")


def _check_left(path: Path, finished: bool) -> None:
    if finished or (path / FINAL_MODEL).is_file():
        what = "nothing is left to do" if finished else "it has finished"
        raise ConfigError(f"{path}: {what}; to train on, begin another run with more epochs or steps")


def _say_what_differs(path: Path, plan: RunPlan, *, is_another: bool) -> None:
    """Says which state the run does not restore, and where the caller's own job (`is_another`) differs from before."""
    if anew := begins_anew(plan):
        say(anew)
    if is_another and (changed := changes(described(path), NodeSpec.of(plan, path))):
        say(f"from here on: {changed}")


def _refused(error: DataError) -> None:
    say(f"not used: {error}")


def _mend_events(path: Path) -> float:
    """Removes the half-written last line of a killed process; returns the time of the last event."""
    if not path.is_file():
        return 0.0
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return float(max((event["time_s"] for event in EventLines().take(data[:whole])), default=0.0))


# ---- begins anew -------------------------------------------------------------------------
# What a resumed run does not restore from its checkpoint: state that belongs to single processes.


def begins_anew(plan: RunPlan) -> str:
    """A sentence that names the state that starts over; "" if the run restores everything, or is not resumed."""
    return "; ".join(_begun(plan, plan.resume)) if plan.resume is not None else ""


def _begun(plan: RunPlan, resume: Resume) -> Iterator[str]:
    workers = list(map(worker_name, range(plan.workers)))
    new = ", ".join(name for name in workers if name not in resume.steps)
    if kept := _on_workers(plan):
        yield f"{kept} begins anew: it is in no checkpoint"
    if resume.remainders and plan.remainders != resume.remainders:
        now = f"this run has {plan.remainders or 'nothing of that kind'}"
        yield f"what workers had not sent yet is dropped: it was {resume.remainders}; {now}"
    elif resume.remainders:
        if new:
            yield f"new workers begin with nothing left to send: {new}"
        if gone := ", ".join(name for name in resume.steps if name not in workers):
            yield f"what workers that are no more had not sent yet is dropped: {gone}"
    if resume.replicas and plan.replicas != resume.replicas:
        now = plan.replicas or f"this run has {type(plan.strategy).__name__}"
        yield f"workers begin with the mean of all: the checkpoint has {resume.replicas} on each; {now}"
    elif resume.replicas and new:
        yield f"new workers begin with the mean of all: {new}"
    if resume.predictors and plan.predictors != resume.predictors:
        now = plan.predictors or "this run has none"
        yield f"predictors of the checkpoint are not used: they were of {resume.predictors}; {now}"
    elif resume.predictors and new:
        yield f"predictors of new workers begin at zero: {new}"


def _on_workers(plan: RunPlan) -> str:
    """Names the optimizer state that no checkpoint has: that of workers that make their own steps; "" if none."""
    if not plan.trains_locally:
        return ""
    if plan.open_ended or plan.replicas:  # each worker's own, which the checkpoint has
        return ""
    names = ", ".join(plan.optimizer.state_names)
    return names and f"{names} of each worker's own {type(plan.optimizer).__name__}"


# ---- changes -----------------------------------------------------------------------------
# Options of the job that differ from those of its run so far.

_NOT_ASKED = frozenset({"run_dir", "name", "chunk_elems", "cwd"})
"""Fields for where a run is kept, where it was started and what it is called, and a field that a checkpoint has."""


def changes(before: NodeSpec, now: NodeSpec) -> str:
    """Names each value of a run that has changed: "epochs = 20, before 10"; "" if none has.

    Args:
        before: the description of the run as it was started, or last resumed.
        now: the description from the plan by which it continues.
    """
    old, new = dict(_values(before)), dict(_values(now))
    return "; ".join(
        f"{key} = {new.get(key)}, before {old.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    )


def _values(spec: NodeSpec) -> Iterator[tuple[str, Any]]:
    for name, value in spec.plain.items():
        if name == "argv":
            yield "arguments of the job file", list(value or ())[1:]
        elif name not in _NOT_ASKED:
            yield from _flat(name, value)
    for name, chosen in (("strategy", spec.strategy), ("optimizer", spec.optimizer)):
        yield name, str(chosen.get("class", "")).rpartition(":")[2]
        yield from _flat(name, chosen.get("fields", {}))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    else:
        yield name, list(value) if isinstance(value, tuple) else value
