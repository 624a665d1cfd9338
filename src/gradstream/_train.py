"""`train()`: runs a job in processes, on this machine or on several, and returns the finished run."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import re
import secrets
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Unpack

from gradstream._detached import start_launcher
from gradstream._launch import callbacks_of, load_run, run_nodes
from gradstream.errors import ConfigError
from gradstream.job.descriptions import check_places
from gradstream.job.files import Asked, intercept, job_of, script_of_caller
from gradstream.job.job import Data, Job, JobOptions, is_script, make_job, spread_out
from gradstream.job.phase_jobs import measured_first
from gradstream.job.plan import RunPlan
from gradstream.job.sources import STARTED_IN
from gradstream.job.validation import check_script
from gradstream.report.progress_line import shown
from gradstream.run.followed_events import OnEvent
from gradstream.run.launcher import Launcher
from gradstream.run.nodes import check_model
from gradstream.run.planning import plan_run
from gradstream.run.preparation import LaunchOptions, OnAddress, Preparation
from gradstream.run.remote.address import Address
from gradstream.run.remote.listening import Listening
from gradstream.run.result import Run
from gradstream.runtime.storage import disk_remedy, private_folder
from gradstream.trackers.services import check_trackers
from gradstream.traits import refuse

NO_SCRIPT = (
    "train() was not called from a script, so other processes cannot find the code of the job: all nodes "
    "run as threads of this process. They share its memory and Python's lock, and compute by turns; a job "
    "file scales better (see `gradstream new`). processes=False says that this is meant."
)

ENGINES = {"ray": "gradstream.ext.ray.engine:RayEngine"}
"""Where the engines are that `engine` may name. Each is imported when it is first used."""

_made: dict[str, list[Path]] = {}
"""Run directories that this process has made, by the spec of the job: a script may make several."""


class RunEngine(Protocol):
    """Another program that runs the nodes of a job; `ENGINES` lists those that have a name."""

    @classmethod
    def parse(cls, text: str) -> RunEngine:
        """Reads an engine from command-line text such as "ray?cpus=4". Raises ConfigError."""

    def run(
        self, job: str, words: Sequence[str], *, workers: int, run_dir: Path, on_event: OnEvent | None
    ) -> None:
        """Trains to the end. Afterwards `run_dir` holds the run, as far as it got. Raises as `train`.

        Args:
            job: the job: "module:function", or the absolute path of a file, or "file.py:function".
            words: options of `gradstream train`, and arguments of the job file after "--".
            workers: number of workers, or of parts of replicas.
            run_dir: where to put the finished run.
            on_event: called with each event of the run.
        """


def train(
    model: Asked,
    data: Data | None = None,
    *,
    on_event: OnEvent | None = None,
    progress: bool | None = None,
    processes: bool | None = None,
    listen: str | Listening | None = None,
    wait: int = 2,
    detach: bool = False,
    engine: str | RunEngine | None = None,
    **options: Unpack[JobOptions],
) -> Run:
    """Trains a model with worker and server processes, on this machine or on several.

    Args:
        model: a `Model`, a function that makes one, a whole `Job`, or a function that makes a job.
        data: a data set, the name of one, or a pair of arrays (inputs, targets); None if `model` is a job.
        on_event: called with each event of the run, in the form of `events.jsonl`.
        progress: whether a line on stderr shows the progress. None shows it at a terminal and in a notebook,
            unless `on_event` is set; if stderr is a file, nothing is shown.
        processes: whether nodes are processes, or threads of this one. None uses processes where
            they can find the job (in a script, or by `load_job`); in a notebook or at a prompt they cannot,
            and a warning says that nodes are threads.
        listen: the address at which other machines reach this one, "10.0.0.1" or "10.0.0.1:4000".
            `train` prints the command that joins another machine to stderr, and training begins when all
            machines have joined. None trains on this machine alone. See `run.remote.listening.Listening`.
        wait: number of machines, this one included, with `listen`. Each has one worker and, unless `servers`
            is set, one shard of the parameter server.
        detach: whether to return at once while the run goes on without this process: see `gradstream.runs.attach`.
        engine: has another program run the nodes: "ray", or a `gradstream.ext.ray.engine.RayEngine` for more options.
            The job must be in a file, or in the calling script: the nodes read it from there.
        options: fields of `Job`: strategy, optimizer, workers, batch_size, epochs, ... If `model` is a
            job, they replace its fields; `steps` also replaces its `epochs`, and vice versa.

    Returns:
        The run: parameters, history, figures, `evaluate`. With `detach`, its directory and what is there so far.

    Raises:
        ConfigError: an argument is wrong. Nothing was started.
        UserCodeError, GradientError: the user's code failed on a node; the message names the node, and
            `traceback_text` is the traceback.
        PeerLostError: a node was lost without which the strategy cannot continue.
        RefusedError, DeadlineError: a node or a machine was refused, or did not join in time.
        Interrupted: Ctrl-C or SIGTERM; a checkpoint was made first, and the message says how to resume the
            run. A second one ends the run at once (KeyboardInterrupt, SystemExit).

        After any of these the run directory is kept, and no process is left.

    Example:
        >>> run = train(model, data, strategy="downpour", workers=2, epochs=3)  # doctest: +SKIP
        >>> run.evaluate().accuracy  # doctest: +SKIP
    """
    job = measured_first(make_job(job_of(model, data), data, **options))
    kept = intercept(job)
    if kept is not None:
        return load_run(kept, job)
    check_ways(job, engine, processes, listen, detach, on_event, progress)
    if engine is not None:
        words = [] if job.spec is None else words_of({k: v for k, v in options.items() if k != "run_dir"})
        with shown(on_event, progress) as each:
            return train_by_engine(job, engine, words, on_event=each)
    if is_script(job):
        set_by = {name for name, origin in job.origins.items() if not origin.startswith("default")}
        check_script(job, {*options, *set_by})
    spec = _place(job, processes if listen is None and not detach else True)
    name = job.name or Path(spec or "session").name.partition(":")[0].removesuffix(".py")
    cwd = STARTED_IN if job.spec is None else job.cwd
    job = dataclasses.replace(job, spec=spec, argv=job.argv or sys.argv, cwd=cwd, name=name)
    listening = _listening(listen, wait)
    if listening is not None:
        if "workers" not in options:
            total = listening.machines * listening.workers_per_machine
            job = dataclasses.replace(job, workers=max(1, total // job.split))
        listening.check(job, earlier=spec in _made)
        job = spread_out(listening.spread_servers(job), "listen")
    plan = plan_run(job, secrets.token_hex(8))
    check_model(plan)
    as_threads = processes is False or spec is None
    if not as_threads:
        check_places(plan.optimizer)
    check_trackers(job.trackers)
    run_dir = make_run_dir(job)
    with shown(on_event, False if detach else progress) as each:
        return launch(plan, run_dir, on_event=each, as_threads=as_threads, listening=listening, detach=detach)


def train_by_engine(
    job: Job, engine: str | RunEngine, words: Sequence[str], *, on_event: OnEvent | None = None
) -> Run:
    """Trains a job on the nodes of an engine and returns the finished run; see `train`.

    Args:
        engine: an engine, or its name and options as its `parse` reads them.
        words: options of `gradstream train` with which the nodes read the job's file.
        on_event: called with each event of the run.
    """
    asked = _engine(engine) if isinstance(engine, str) else engine
    spec, argv = job.spec or script_of_caller(), list(job.argv or sys.argv)[1:]
    place, colon, function = spec.partition(":")
    if job.spec is None and spec in _made:
        raise ConfigError(
            "train(engine=...): this script has made another run before this one, and the nodes would read that one's "
            "job: put the job of this run into a file of its own"
        )
    job = dataclasses.replace(job, name=job.name or Path(place).name.removesuffix(".py"))
    begun = job.run_dir is not None and (Path(job.run_dir) / "run.json").is_file()
    run_dir = Path(str(job.run_dir)).resolve() if begun else make_run_dir(job)
    try:
        asked.run(
            f"{Path(place).resolve()}{colon}{function}" if place.endswith(".py") else spec,
            [*words, *(["--", *argv] if argv else [])],
            workers=job.workers * job.split,
            run_dir=run_dir,
            on_event=on_event,
        )
    except BaseException:
        with contextlib.suppress(OSError):
            run_dir.rmdir()  # it is empty if nothing was started
        raise
    _made.setdefault(spec, []).append(run_dir)
    return load_run(run_dir, job)


def _engine(text: str) -> RunEngine:
    """The engine that this text names. Raises ConfigError if there is none of that name."""
    name = re.split(r"\W", text, maxsplit=1)[0]
    if name not in ENGINES:
        raise ConfigError(f"engine {text!r}: expected {' or '.join(ENGINES)}, with options or without")
    module, _, member = ENGINES[name].partition(":")
    engine: type[RunEngine] = getattr(importlib.import_module(module), member)
    return engine.parse(text)


def words_of(options: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The options of a call of `train`, written as command-line arguments.

    Raises:
        ConfigError: a value is an object, which other processes can only read from a file.
    """
    words = []
    for name, value in options.items():
        if name == "strategy_options" and isinstance(value, Mapping):
            words += words_of(value, "strategy.")
            continue
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(
                f"train({name}=..., engine=...): the nodes read the job's file, and cannot be given "
                f"{type(value).__name__} objects; put it into the job file"
            )
        words += ["--set", f"{prefix}{name}={str(value).lower() if isinstance(value, bool) else value}"]
    return words


def launch(plan: RunPlan, run_dir: Path, *, detach: bool = False, **options: Any) -> Run:
    """Runs the nodes of a new or a resumed run and returns the finished run; see `train`.

    Args:
        plan: as `plan_run` makes it.
        run_dir: an existing directory.
        detach: whether another process runs the nodes; the run is returned as it is now.
        options: fields of `LaunchOptions`. A run with `stop` is a trial, and does not count among the runs that the
            job's script has made.
    """
    earlier = tuple(_made.get(plan.job.spec or "", ()))
    launching = LaunchOptions(earlier=earlier, **options)
    if detach:
        Preparation(plan, run_dir, launching).write_files()
        start_launcher(run_dir, cwd=plan.job.cwd)
        run = Run.load(run_dir)
    else:
        run = run_nodes(plan, run_dir, launching)
    counts = run_dir not in earlier and not launching.is_trial and not is_script(plan.job)
    if plan.job.spec is not None and counts:
        _made.setdefault(plan.job.spec, []).append(run_dir)
    return run


def host(
    job: Job, on_address: OnAddress, *, processes: bool = True, listening: Listening | None = None
) -> Run:
    """Runs the coordinator and the shards of a run to its end, while other programs start the workers.

    Args:
        job: an open-ended job (see `gradstream.session`).
        on_address: called with the path of nodes.json, the coordinator's address, and the network arguments of a
            worker of this machine.
        processes: whether coordinator and shards are processes; otherwise threads of this one.
        listening: how workers of other machines join; None if there are none.

    Raises:
        GradstreamError: the run failed, as in `train`.
    """
    job = dataclasses.replace(job, argv=sys.argv, name=job.name or Path(job.spec or "session").stem)
    if listening is not None:
        listening.check(job, earlier=False)
    plan = plan_run(job, secrets.token_hex(8))
    check_trackers(job.trackers)
    run_dir = make_run_dir(job)
    callbacks = callbacks_of(job, run_dir)
    options = LaunchOptions(
        on_event=callbacks.beside(None), as_threads=not processes, listening=listening, on_address=on_address
    )
    try:
        Launcher(plan, run_dir, options).run()
    finally:
        callbacks.end(lambda: Run.load(run_dir))
    return Run.load(run_dir)


def check_ways(
    job: Job,
    engine: object,
    processes: bool | None,
    listen: object,
    detach: bool,
    on_event: OnEvent | None,
    progress: bool | None,
) -> None:
    """Raises ConfigError if ways of starting a run exclude each other."""
    asked = {
        "engine": engine is not None and "engine=...",
        "processes=": processes is not None and f"processes={processes}",
        "threads": processes is False and "processes=False",
        "listen": listen is not None and "listen=...",
        "detach": detach and "detach=True",
        "on_event": on_event is not None and "on_event=...",
        "progress": progress and "progress=True",
        "script": is_script(job) and "a script",
    }
    refuse({name: text for name, text in asked.items() if text})


def _listening(listen: str | Listening | None, wait: int) -> Listening | None:
    if isinstance(listen, str):
        return Listening(address=Address.parse(listen, "listen"), machines=wait)
    return listen


def _place(job: Job, processes: bool | None) -> str | None:
    """The place where other processes find the job; None if they cannot, and nodes are threads.

    Raises:
        ConfigError: they cannot find it, but `processes` asks for processes.
    """
    if job.spec is not None:
        return job.spec
    try:
        return script_of_caller()
    except ConfigError:
        if processes:
            raise
    if processes is None:
        warnings.warn(NO_SCRIPT, stacklevel=3)
    return None


def make_run_dir(job: Job) -> Path:
    """Makes a new, empty directory: the one of the job, or runs/<utc>-<name> where the program was started."""
    try:
        return _new_run_dir(job)
    except OSError as error:
        raise ConfigError(
            f"run directory {error.filename or job.run_dir} cannot be made: {error.strerror}; "
            f"{disk_remedy(error)}, or name another with run_dir=, or --run-dir"
        ) from error


def _new_run_dir(job: Job) -> Path:
    if job.run_dir is not None:
        path = Path(job.run_dir).resolve()
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"run_dir {path} exists and is not an empty directory: name a new one")
        private_folder(path)
        return path
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    base = Path(job.cwd or "", "runs").resolve() / f"{stamp}-{job.name}"
    base.parent.mkdir(parents=True, exist_ok=True)
    for count in range(1000):
        path = base.with_name(f"{base.name}-{count}") if count else base
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path
    raise ConfigError(f"{base} and a thousand more exist: clean up {base.parent}")
