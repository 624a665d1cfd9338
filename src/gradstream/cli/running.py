"""Runs a job under a progress display, and prints its figures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gradstream.job.job import Job
    from gradstream.run.result import Run
    from gradstream.telemetry.events import EventDict

OnEvent = Callable[["EventDict"], None]


def run_and_show(run_job: Callable[[OnEvent], Run], as_json: bool) -> None:
    """Runs a job, with its progress on stderr, and prints its figures on stdout: a table, or one JSON object."""
    from gradstream.cli.report import print_end
    from gradstream.report.progress_line import Display
    from gradstream.run.failures import evaluate

    with redirect_stdout(sys.stderr) if as_json else nullcontext(), Display() as display:
        run = run_job(display.on_event)
    print_end(run, evaluate(run), as_json)


def show_detached(run: Run, as_json: bool) -> None:
    """Prints where a run that goes on without this terminal is, and how to follow and stop it."""
    import json
    import shlex

    from gradstream.cli.report import print_rows

    path = str(run.path)
    if as_json:
        click.echo(json.dumps({"run_dir": path}))
        return
    rows = [
        ("name", str(run.info.get("name", ""))),
        ("run directory", path),
        ("watch", f"gradstream attach {shlex.quote(path)}"),
        ("stop", f"gradstream stop {shlex.quote(path)}"),
    ]
    print_rows(rows)


def show_dry_run(job: Job, as_json: bool) -> None:
    """Checks a job by a dry run, and prints the result of each check.

    Raises:
        PreflightError: a check failed. All results are printed by then.
    """
    import dataclasses
    import json

    from gradstream.cli.report import print_rows
    from gradstream.errors import PreflightError
    from gradstream.preflight import dry_run

    results = dry_run(job)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(result) for result in results]))
    else:
        print_rows(
            [
                (one.name, f"{'ok' if one.ok else 'FAILED':6}  {one.seconds:4.1f} s  {one.detail}")
                for one in results
            ]
        )
        click.echo(f"{sum(one.seconds for one in results):.1f} s in all", err=True)
    last = results[-1]
    if not last.ok:
        if last.trace:
            click.echo(f"\n{last.trace.rstrip()}", err=True)
        raise PreflightError(f"the dry run failed at: {last.name}")
