"""`gradstream replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gradstream.cli.options import json_option

__all__ = ["replay"]


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False), metavar="RUN")
@click.option("--until-update", type=click.IntRange(min=1), metavar="N", help="Stop at the N-th update.")
@click.option("--worker", type=click.IntRange(min=0), metavar="RANK", help="With --step: stop at its update.")
@click.option("--step", type=click.IntRange(min=0), metavar="STEP", help="Of --worker, from 0.")
@click.option(
    "--version", type=click.IntRange(min=1), metavar="V", help="Stop at the update that made this version..."
)
@click.option("--chunk", type=click.IntRange(min=0), metavar="C", help="... of this chunk; else of 0.")
@click.option(
    "--find",
    type=click.Choice(["nan", "jump"]),
    help="Stop where a parameter is no number any more; where the loss is 3 times what it was.",
)
@click.option("--watch", is_flag=True, help="A line for each update on the way.")
@click.option("--anyway", is_flag=True, help="Though packages or the processor are others than they were.")
@json_option
def replay(run: Path, watch: bool, anyway: bool, as_json: bool, **place: Any) -> None:
    """Repeats a recorded run bit for bit, and stops at any update.

    RUN is a run directory made with --record. All nodes run in this process, in the order that was
    recorded; the job is read again from its file. Says of the update whose it was, of which samples, on
    which version it was computed and to which it was applied. Without a place to stop it goes to the end,
    and compares the parameters with those that the run has kept.

    \b
    Examples:
      gradstream replay runs/20261120-120000-mine
      gradstream replay runs/20261120-120000-mine --watch
      gradstream replay runs/20261120-120000-mine --worker 2 --step 120
      gradstream replay runs/20261120-120000-mine --find nan
    """
    from gradstream.cli.replaying import ReplayQuery, show_replay

    show_replay(run, ReplayQuery(**place), watch=watch, anyway=anyway, as_json=as_json)
