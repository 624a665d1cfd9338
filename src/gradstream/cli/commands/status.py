"""`gradstream status`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
def status(run: Path) -> None:
    """Says how a run is on each machine on which `gradstream launch --hosts` has started it.

    RUN is its local folder. A line for each machine: whether its process runs, and the last line of its log.

    \b
    Examples:
      gradstream status runs/mine
    """
    from gradstream.cli.hosts import fleet_of, show_states

    show_states(fleet_of(run))
