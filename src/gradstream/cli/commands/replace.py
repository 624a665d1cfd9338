"""`gradstream replace`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.argument("gone")
@click.argument("host")
def replace(run: Path, gone: str, host: str) -> None:
    """Has HOST take the place of a machine that is GONE, in a run of `gradstream launch --hosts`.

    RUN is the local folder of the run. HOST may be a new machine, or the same one anew. The others train on
    meanwhile; job, data and token come from the first machine.

    \b
    Examples:
      gradstream replace runs/mine c i
      gradstream replace runs/mine b b
    """
    from gradstream.cli.hosts import fleet_of, replace_on

    replace_on(fleet_of(run), run, gone, host)
