"""`gradstream attach`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gradstream.cli.options import json_option


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@json_option
def attach(run: Path, as_json: bool) -> None:
    """Shows the progress of a run until it ends, then its figures.

    RUN is the directory of a run, detached or not, or the local folder of one on other machines (`gradstream
    launch --hosts`). Output and exit status are those of `gradstream
    train`. Ctrl-C leaves the run alone. Where the launcher of a detached run was killed, another one is
    started, which takes over its nodes. Of a run that has ended, it says how.

    \b
    Examples:
      gradstream attach runs/20261120-120000-mine
    """
    from gradstream.cli.hosts import follow as follow_hosts
    from gradstream.run.ssh.fleet import Fleet

    if fleet := Fleet.of(run):
        sys.exit(follow_hosts(fleet, run))
    from gradstream.cli.report import print_end
    from gradstream.errors import Interrupted
    from gradstream.report.display import Display
    from gradstream.run.final_evaluation import evaluation_of_run
    from gradstream.runs import attach as follow
    from gradstream.untrusted import say

    try:
        with Display() as display:
            ended = follow(run, on_event=display.on_event)
    except Interrupted as error:
        say(str(error))
        raise
    print_end(ended, evaluation_of_run(ended), as_json)
