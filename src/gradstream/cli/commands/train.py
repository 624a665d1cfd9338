"""`gradstream train`."""

from __future__ import annotations

from typing import Any

import click

from gradstream.cli.options import job_options, load_job_with
from gradstream.cli.running import run_and_show

__all__ = ["train"]


@click.command()
@job_options
def train(job: str, as_json: bool, **given: Any) -> None:
    """Trains with worker and server processes on this machine.

    Progress goes to stderr, figures to stdout.

    \b
    Examples:
      gradstream train JOB.py
      gradstream train JOB.py --strategy downpour --set push_every=10 --workers 4
      gradstream train JOB.py --config slow-network.toml --json > figures.json
    """
    from gradstream.train import train as run_job

    chosen = load_job_with(job, **given)
    run_and_show(lambda on_event: run_job(chosen, on_event=on_event), as_json)
