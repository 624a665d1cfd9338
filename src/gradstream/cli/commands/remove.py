"""`gradstream remove`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.argument("host")
def remove(run: Path, host: str) -> None:
    """Has HOST leave a run of `gradstream launch --hosts`: it hands in what it has computed, and is cleaned up.

    RUN is the local folder of the run. HOST is not its first machine, which has the parameters. The others train
    on, and its place is free for another one (`gradstream add`).

    \b
    Examples:
      gradstream remove runs/job c
    """
    from gradstream.cli.hosts import fleet_of, remove_from

    remove_from(fleet_of(run), run, host)
