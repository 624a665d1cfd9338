"""`gradstream status`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option("--adopt", is_flag=True, help="Believe a run folder that was made on another machine.")
def status(run: Path, adopt: bool) -> None:
    """Says how a run is on each machine on which `gradstream launch --hosts` has started it.

    RUN is its local folder. A line for each machine: whether its process runs, and the last line of its log.

    A run folder can name programs and code. Of one that this machine has not made they are not run, until you say by
    --adopt that you trust whoever made it.

    \b
    Examples:
      gradstream status runs/mine
    """
    from gradstream.cli.hosts import adopt as believe
    from gradstream.cli.hosts import fleet_of, show_states
    from gradstream.run.files import HOSTS

    if adopt:
        believe(run)
        if not (run / HOSTS).exists():
            return
    show_states(fleet_of(run))
