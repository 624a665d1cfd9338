"""`gradstream logs`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.argument("host", required=False)
def logs(run: Path, host: str | None) -> None:
    """Prints what the machines of `gradstream launch --hosts` have said so far.

    RUN is the local folder of the run; HOST one of its machines, by default all of them.

    \b
    Examples:
      gradstream logs runs/mine
      gradstream logs runs/mine b
    """
    from gradstream.cli.hosts import fleet_of, show_logs

    show_logs(fleet_of(run), host)
