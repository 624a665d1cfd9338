"""`gradstream reshard`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option("--servers", type=int, required=True, help="New number of shards of the parameter server.")
@click.option("--wait-s", type=float, default=300.0, metavar="SECONDS", help="Longest wait (300).")
def reshard(run: Path, servers: int, wait_s: float) -> None:
    """Changes the number of shards of a run that goes on.

    RUN is a run directory. New shards are started, get the parameters while the workers wait, and take the place of the
    present ones. If a node is lost meanwhile, the present ones stay, and the exit status is not 0.

    \b
    Examples:
      gradstream reshard runs/20261120-120000-mine --servers 4
    """
    from gradstream.runs import reshard as change
    from gradstream.untrusted import TEXT_BYTES, escaped

    click.echo(escaped(change(run, servers=servers, wait_s=wait_s), TEXT_BYTES))
