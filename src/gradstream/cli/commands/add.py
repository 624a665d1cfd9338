"""`gradstream add`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.argument("host")
def add(run: Path, host: str) -> None:
    """Has HOST join a run of `gradstream launch --hosts` that has a free place.

    RUN is the local folder of the run. `--room N` made N places more than there were machines, and each machine
    that `gradstream remove` takes out leaves one. The others train on meanwhile.

    \b
    Examples:
      gradstream launch --hosts a,b --room 2 --detach JOB.py
      gradstream add runs/job c
    """
    from gradstream.cli.hosts import add_on, fleet_of

    add_on(fleet_of(run), run, host)
