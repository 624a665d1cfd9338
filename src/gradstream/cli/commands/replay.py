"""`gradstream replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gradstream.cli.options import json_option


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False), metavar="RUN")
@click.option("--until-update", type=click.IntRange(min=1), metavar="N", help="Stop at the N-th update.")
@click.option(
    "--worker", type=click.IntRange(min=0), metavar="RANK", help="Stop at the update of this worker's --step."
)
@click.option("--step", type=click.IntRange(min=0), metavar="STEP", help="Step of --worker, counted from 0.")
@click.option(
    "--version",
    type=click.IntRange(min=1),
    metavar="V",
    help="Stop at the update that made this version of --chunk.",
)
@click.option("--chunk", type=click.IntRange(min=0), metavar="C", help="Chunk of --version; 0 by default.")
@click.option(
    "--find",
    type=click.Choice(["nan", "jump"]),
    help="Stop at the first parameter that is not a number (nan), or where the loss has tripled (jump).",
)
@click.option("--watch", is_flag=True, help="Print a line for each update.")
@click.option(
    "--anyway", is_flag=True, help="Replay although packages or the processor differ from the run's."
)
@json_option
def replay(run: Path, watch: bool, anyway: bool, as_json: bool, **place: Any) -> None:
    """Repeats a recorded run bit for bit, and stops at any update.

    RUN is the directory of a run with --record. All nodes run in this process, in the recorded order;
    the job is read again from its file. The command prints the worker and the samples of the update, the
    version it was computed on, and the version it was applied to. Without an update to stop at, it goes
    to the end, and compares the parameters with those that the run has kept.

    \b
    Examples:
      gradstream replay runs/20261120-120000-mine
      gradstream replay runs/20261120-120000-mine --watch
      gradstream replay runs/20261120-120000-mine --worker 2 --step 120
      gradstream replay runs/20261120-120000-mine --find nan
    """
    from gradstream.cli.replaying import ReplayQuery, show_replay

    show_replay(run, ReplayQuery(**place), watch=watch, anyway=anyway, as_json=as_json)
