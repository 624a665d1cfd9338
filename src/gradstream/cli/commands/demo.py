"""`gradstream demo`."""

from __future__ import annotations

import click

from gradstream.cli.options import json_option
from gradstream.cli.running import run_and_show

__all__ = ["demo"]

JOB = "gradstream.cli.demo_job:job"


@click.command()
@json_option
def demo(as_json: bool) -> None:
    """Trains a small CNN on embedded images with 2 workers and 1 parameter server.

    \b
    Examples:
      gradstream demo
      gradstream demo --json
    """
    from gradstream._train import train as run_job
    from gradstream.job.files import load_job

    click.echo(
        "A CNN on Fashion-MNIST (5,000 images): 2 workers, 1 parameter server, strategy downpour.", err=True
    )
    job = load_job(JOB)
    run_and_show(lambda on_event: run_job(job, on_event=on_event), as_json)
