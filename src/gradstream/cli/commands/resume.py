"""`gradstream resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gradstream.cli.machines import listen_options, listening_of
from gradstream.cli.options import detach_option, json_option
from gradstream.cli.running import run_and_show, show_detached


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option("--workers", type=int, help="New number of replicas of the model.")
@click.option("--servers", type=int, help="New number of shards of the parameter server.")
@click.option("--split", type=int, help="New number of processes that hold one replica together.")
@click.option("--batch-size", type=int, help="New number of samples per minibatch of one worker.")
@click.option("--epochs", type=int, help="Passes over the data, including those before.")
@click.option("--steps", type=int, help="Minibatches of each worker, including those before.")
@click.option("--device", metavar="NAME", help="Another device to compute on.")
@click.option(
    "--allow-lost",
    is_flag=True,
    default=None,
    help="Finish the run even if a lost worker's own loop leaves data undone.",
)
@click.option(
    "--allow-changed",
    is_flag=True,
    default=None,
    help="Go on with the files of the job, and the data, as they are now.",
)
@click.option(
    "--from-start",
    is_flag=True,
    help="Begin again where all checkpoints are damaged.",
)
@listen_options
@detach_option
@json_option
def resume(run: Path, as_json: bool, detach: bool, **given: Any) -> None:
    """Continues a run that was stopped or killed from its newest good checkpoint.

    RUN is a run directory. The command reads the job again from its files, which must not have changed,
    nor the data, unless --allow-changed says so. The run goes on in the same directory, and repeats the
    steps after the checkpoint. Where a checkpoint is damaged, the run goes on from the one before; where
    all are damaged, it does not start.

    \b
    Examples:
      gradstream resume runs/20261120-120000-mine
      gradstream resume runs/20261120-120000-mine --workers 4 --servers 2
    """
    from gradstream._resume import resume as resume_run

    names = ("listen", "wait", "workers_per_machine", "servers_on", "wait_s", "insecure", "token_file")
    listening = listening_of(**{name: given.pop(name) for name in names}, workers=_processes(given))
    options: Any = {name: value for name, value in given.items() if value is not None}
    if detach:
        show_detached(resume_run(run, listen=listening, detach=True, **options), as_json)
        return
    run_and_show(lambda on_event: resume_run(run, on_event=on_event, listen=listening, **options), as_json)


def _processes(given: dict[str, Any]) -> int | None:
    """Number of processes of all replicas, where the options tell it."""
    workers: int | None = given["workers"]
    return None if workers is None else workers * (given["split"] or 1)
