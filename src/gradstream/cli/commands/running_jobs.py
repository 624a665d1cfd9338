"""Commands for running jobs, and the list of all runs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gradstream.cli.options import json_option, run_argument

NAME_BYTES = 128


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def runs(folder: Path, as_json: bool) -> None:
    """Lists the run directories in FOLDER (runs by default), the newest last.

    An unfinished run is "running" if a process of this machine runs it, and "unfinished" otherwise:
    `gradstream resume` continues it.

    The accuracy is from the latest evaluation: during the run (see evaluate_every), at the end of
    `gradstream train`, or by `gradstream evaluate`.

    \b
    Examples:
      gradstream runs
      gradstream runs elsewhere/runs --json
    """
    import json
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gradstream.run.result import list_runs
    from gradstream.untrusted import escaped, say

    entries = list_runs(folder)
    for run in entries:
        if run["damaged"]:
            say(run["damaged"])
    if as_json:
        for run in entries:
            click.echo(json.dumps({**run, "path": str(run["path"])}))
        return
    table = Table("run", "status", "strategy", "accuracy", "loss", "samples/s", "time", box=None)
    for run in entries:
        rate, seconds = run["samples_per_s"], run["train_s"]
        table.add_row(
            Text(escaped(run["path"].name, NAME_BYTES)),
            run["status"],
            Text(escaped(run["strategy"] or "", NAME_BYTES)),
            "" if run["accuracy"] is None else f"{run['accuracy']:.2%}",
            "" if run["loss"] is None else f"{run['loss']:.4g}",
            "" if rate is None else f"{rate:,.0f}",
            "" if seconds is None else f"{seconds:.1f} s",
        )
    width = None if sys.stdout.isatty() else 160  # without a terminal, nothing is cut off
    Console(highlight=False, width=width).print(table)


@click.command()
@run_argument
@json_option
def attach(run: Path, as_json: bool) -> None:
    """Shows the progress of a run until it ends, then its figures.

    RUN is the directory of a run, detached or not, or the local folder of a run on other machines (`gradstream
    launch --hosts`). Output and exit status are those of `gradstream
    train`. Ctrl-C leaves the run alone. For a run that has ended, the command says how it ended.

    \b
    Examples:
      gradstream attach runs/20261120-120000-mine
    """
    from gradstream.cli.hosts import follow as follow_hosts
    from gradstream.ext.ssh.fleet import Fleet

    if fleet := Fleet.of(run):
        sys.exit(follow_hosts(fleet, run))
    from gradstream.cli.report import print_end
    from gradstream.errors import Interrupted
    from gradstream.report.progress_line import Display
    from gradstream.run.failures import evaluation_of_run
    from gradstream.runs import attach as follow
    from gradstream.untrusted import say

    try:
        with Display() as display:
            ended = follow(run, on_event=display.on_event)
    except Interrupted as error:
        say(str(error))
        raise
    print_end(ended, evaluation_of_run(ended), as_json)


@click.command()
@run_argument
@click.option("--adopt", is_flag=True, help="Believe a run folder that was made on another machine.")
def status(run: Path, adopt: bool) -> None:
    """Shows the state of a run on each machine on which `gradstream launch --hosts` started it.

    RUN is its local folder. A line for each machine: whether its process runs, and the last line of its log.

    A run folder can name programs and code. Those of a folder from another machine are not run until you say by
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


@click.command()
@run_argument
@click.argument("host", required=False)
def logs(run: Path, host: str | None) -> None:
    """Prints the logs of the machines of `gradstream launch --hosts` so far.

    RUN is the local folder of the run; HOST is one of its machines, by default all of them.

    \b
    Examples:
      gradstream logs runs/mine
      gradstream logs runs/mine b
    """
    from gradstream.cli.hosts import fleet_of, show_logs

    show_logs(fleet_of(run), host)


@click.command()
@run_argument
@click.option("--now", is_flag=True, help="End it at once, without another checkpoint.")
@click.option(
    "--wait-s", type=float, default=120.0, metavar="SECONDS", help="Longest wait for its end (120)."
)
def stop(run: Path, now: bool, wait_s: float) -> None:
    """Ends a run, detached or not, as Ctrl-C in its terminal does.

    RUN is a run directory. A checkpoint is made first, if the job makes any; the command waits for it, and
    prints the command that resumes the run. Exit status 4 if the run has not ended in time.

    \b
    Examples:
      gradstream stop runs/20261120-120000-mine
      gradstream stop runs/20261120-120000-mine --now
    """
    from gradstream.cli.hosts import stop as stop_hosts
    from gradstream.ext.ssh.fleet import Fleet

    if fleet := Fleet.of(run):
        stop_hosts(fleet, run, *(["--now"] if now else []), wait_s=wait_s)
        return
    from gradstream.runs import stop as end
    from gradstream.untrusted import TEXT_BYTES, escaped

    click.echo(escaped(end(run, now=now, wait_s=wait_s), TEXT_BYTES))


@click.command()
@run_argument
@click.option("--servers", type=int, required=True, help="New number of shards of the parameter server.")
@click.option("--wait-s", type=float, default=300.0, metavar="SECONDS", help="Longest wait (300).")
def reshard(run: Path, servers: int, wait_s: float) -> None:
    """Changes the number of shards of a running job.

    RUN is a run directory. New shards are started, get the parameters while the workers wait, and replace the
    present shards. If a node is lost meanwhile, the present shards stay, and the exit status is not 0.

    \b
    Examples:
      gradstream reshard runs/20261120-120000-mine --servers 4
    """
    from gradstream.runs import reshard as change
    from gradstream.untrusted import TEXT_BYTES, escaped

    click.echo(escaped(change(run, servers=servers, wait_s=wait_s), TEXT_BYTES))
