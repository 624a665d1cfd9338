"""Runs the nodes of a run together with the callbacks of its job, and returns the finished run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gradstream.errors import GradstreamError, Interrupted
from gradstream.job.callbacks import Callbacks
from gradstream.job.job import AMONG, Job, build_model
from gradstream.job.plan import RunPlan
from gradstream.run.launcher import Launcher
from gradstream.run.planning import metrics_of
from gradstream.run.preparation import LaunchOptions
from gradstream.run.result import Run
from gradstream.trackers.services import trackers_of
from gradstream.untrusted import say


def run_nodes(plan: RunPlan, run_dir: Path, options: LaunchOptions) -> Run:
    """Runs the nodes of a run together with the callbacks of the job. Raises as `train`."""
    job = plan.job
    callbacks = callbacks_of(job, run_dir)
    options = dataclasses.replace(options, on_event=callbacks.beside(options.on_event))
    if plan.policy is not None and not options.is_trial:
        there = options.listening is not None and options.listening.machines > 1
        promised = f"{options.listening.promise(plan)}; " if options.listening and there else ""
        say(f"{run_dir}: {f'{AMONG}; ' if plan.averages_gradients else ''}{promised}{plan.policy}")
    try:
        Launcher(plan, run_dir, options).run()
    except (GradstreamError, Interrupted):
        callbacks.end(lambda: Run.load(run_dir))
        raise
    callbacks.end(lambda: load_run(run_dir, job))
    return load_run(run_dir, job)


def callbacks_of(job: Job, run_dir: Path) -> Callbacks:
    """The callbacks and trackers of a job, for one run."""
    chosen = [*job.callbacks, *trackers_of(job.trackers)]
    return Callbacks(chosen, {"name": job.name, "run_dir": str(run_dir)})


def load_run(path: Path, job: Job) -> Run:
    """The run in a directory, with the model, data and metrics of its job."""
    model = build_model(job) if hasattr(job.model, "gradient") else None
    run = Run.load(path, model=model, data=job.data)
    return dataclasses.replace(run, metrics=metrics_of(job))
