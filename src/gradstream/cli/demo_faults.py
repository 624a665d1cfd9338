"""`gradstream demo --faults`: the same job without and with kills, and what is left of the promise."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from gradstream.cli.demo_job import BATCH_SIZE, COUNTERS, IMAGES
from gradstream.cli.kills import KillSchedule, Striker
from gradstream.report.charts import Curve, line_chart, picture, time_text
from gradstream.report.curves import training
from gradstream.report.story import Death, deaths_of

if TYPE_CHECKING:
    from gradstream.job.job import Job
    from gradstream.run.local import LocalCluster
    from gradstream.run.result import Run
    from gradstream.telemetry.events import EventDict

JOB = "gradstream.cli.demo_job:counted"
PICTURE = "faults.svg"
STYLES = {"worker": "c1", "coordinator": "c3", "shard": "c4"}
"""Colours of the marks, by role of the node that was killed."""
ABOUT = "A CNN on Fashion-MNIST (5,000 images): 3 workers, 2 shards of a parameter server, strategy downpour"
POINTS = 60
"""Points of each loss curve: means over so many parts of the run."""


def run_with_faults(seed: int, epochs: int | None = None) -> bool:
    """Trains without and with kills, and prints what came of it. Returns whether the promise was kept.

    Raises:
        GradstreamError: a run has ended early.
    """
    from gradstream.job.files import load_job
    from gradstream.run.local import LocalCluster
    from gradstream.run.local.environment import node_environment

    job = load_job(JOB)
    job = dataclasses.replace(job, seed=seed, epochs=epochs or job.epochs)
    assert job.epochs is not None
    folder = _folder(job)
    with LocalCluster(folder / "logs", node_environment(job.workers), shards=True) as cluster:
        click.echo(f"{ABOUT}. First undisturbed:", err=True)
        quiet = _run(job, folder / "without", cluster, lambda event: None)
        click.echo(f"Then with kill -9, at instants drawn from seed {seed}:", err=True)
        schedule = KillSchedule(seed, [f"worker-{rank}" for rank in range(job.workers)])
        striker = Striker(cluster, schedule, lambda line: click.echo(line, err=True))
        struck = _run(job, folder / "killed", cluster, striker)
    deaths = deaths_of(struck.events)
    broken = broken_promises(struck, job.epochs)
    if not deaths:
        broken.append("nobody was killed: the run was over before")
    path = folder / PICTURE
    path.write_text(faults_picture(quiet, struck, deaths))
    click.echo("\n".join(table_of(deaths)))
    if late := striker.kills - len(deaths):
        click.echo(f"{late} more when the last sample was in the model")
    click.echo(_figures(quiet, struck, job.epochs))
    click.echo(f"picture        {path}")
    for what in broken:
        click.echo(f"PROMISE BROKEN: {what}", err=True)
    return not broken


def broken_promises(run: Run, epochs: int) -> list[str]:
    """What a finished run of `demo_job.counted` has lost or doubled; empty if each sample is in once an epoch.

    The counters in the parameters tell of each image, the versions of the shards' chunks of each push.
    """
    broken = []
    for name in COUNTERS:
        counts = np.asarray(run.parameters[name])
        for what, wrong in {"missing": counts < epochs, "too often": counts > epochs}.items():
            if wrong.any():
                broken.append(f"{int(wrong.sum())} of {IMAGES} images are {what} in the counters {name!r}")
    pushes = epochs * IMAGES // BATCH_SIZE
    for shard, versions in _versions(run).items():
        if set(versions) != {pushes}:
            broken.append(f"chunks of {shard} have had {versions[0]} to {versions[1]} pushes, not {pushes}")
    if run.summary["samples_accounted"] != epochs * IMAGES:
        broken.append(f"{run.summary['samples_accounted']} samples have a receipt, not {epochs * IMAGES}")
    return broken


def _versions(run: Run) -> dict[str, tuple[int, int]]:
    """By shard, the lowest and the highest version of its chunks at the end."""
    reported = [event for event in run.events if event["event"] == "applied"]
    return {event["node"]: (event["min_version"], event["max_version"]) for event in reported}


def table_of(deaths: Sequence[Death]) -> list[str]:
    """The lines of the table of deaths."""
    head = f"{'killed':<12} {'at':>7} {'noticed after':>14} {'took part again after':>22}"
    return [
        head,
        *(f"{d.who:<12} {d.at_s:>5.1f} s {_after(d.noticed_s):>14} {_after(d.back_s):>22}" for d in deaths),
    ]


def _after(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _figures(quiet: Run, struck: Run, epochs: int) -> str:
    rows: list[tuple[str, ...]] = [("", "with kills", "without")]
    rows.append(("loss", *(f"{run.summary['loss']:.3f}" for run in (struck, quiet))))
    rows.append(("test accuracy", *(f"{run.evaluate().accuracy:.1%}" for run in (struck, quiet))))
    rows.append(("training time", *(time_text(run.summary["train_s"]) for run in (struck, quiet))))
    lines = [f"{row[0]:<14} {row[1]:>12} {row[2]:>12}" for row in rows]
    counts = np.unique(np.concatenate([np.asarray(struck.parameters[name]) for name in COUNTERS]))
    seen = " to ".join(f"{count:g}" for count in sorted({counts[0], counts[-1]}))
    lines.append(f"samples        each of {IMAGES:,} images is in the model {seen} times, in {epochs} epochs")
    return "\n".join(lines)


def faults_picture(quiet: Run, struck: Run, deaths: Sequence[Death]) -> str:
    """The loss of both runs over time, and a mark at each death."""
    curves = [
        Curve(name, [(point.time_s, point.value) for point in training(run.events, max_points=POINTS)], style)
        for name, run, style in (("with kills", struck, "c0"), ("without", quiet, "c2"))
    ]
    styles = {death.who: STYLES[death.who.partition("-")[0]] for death in deaths}
    marks = [(death.at_s, styles[death.who], f"{death.who} is killed") for death in deaths]
    told = f"The training loss falls while {len(deaths)} processes are killed"
    chart = line_chart(curves, title=told, x_label="time", x_text=time_text, from_zero=True, marks=marks)
    keys = {
        "c0": "loss, with kills",
        "c2": "loss, without",
        **{STYLES[role]: f"{'the' if role == 'coordinator' else 'a'} {role} dies" for role in STYLES},
    }
    return picture(chart, keys, told)


def _folder(job: Job) -> Path:
    from gradstream._train import make_run_dir

    return make_run_dir(job)


def _run(job: Job, run_dir: Path, cluster: LocalCluster, strike: Callable[[EventDict], None]) -> Run:
    """One run of the job, in a folder of its own; `strike` gets its events."""
    from gradstream._train import launch
    from gradstream.report.progress_line import Display
    from gradstream.run.planning import plan_run

    run_dir.mkdir()
    with Display() as display:

        def on_event(event: EventDict) -> None:
            display.on_event(event)
            strike(event)

        return launch(plan_run(job, secrets.token_hex(8)), run_dir, cluster=cluster, on_event=on_event)
