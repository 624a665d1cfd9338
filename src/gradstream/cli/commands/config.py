"""`gradstream config show`."""

from __future__ import annotations

from typing import Any

import click

from gradstream.cli.options import JobCommand, job_options, load_job_with


@click.group()
def config() -> None:
    """Shows the configuration of a job."""


@config.command(cls=JobCommand)
@job_options
def show(job: str, as_json: bool, **given: Any) -> None:
    """Prints the configuration in effect, and the origin of each value.

    The output is TOML, which --config reads. No run is started.

    \b
    Examples:
      gradstream config show JOB.py
      gradstream config show JOB.py --set strategy.push_every=10
      GRADSTREAM_WORKERS=4 gradstream config show JOB.py
    """
    import dataclasses
    import json

    from gradstream.run.effective_settings import effective, to_toml
    from gradstream.run.planning import plan_run

    plan = plan_run(load_job_with(job, **given), "config")
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(entry) for entry in effective(plan)]))
    else:
        click.echo(to_toml(plan), nl=False)
