"""`gradstream runs`."""

from __future__ import annotations

from pathlib import Path

import click

NAME_BYTES = 128


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def runs(folder: Path, as_json: bool) -> None:
    """Lists the run directories in FOLDER (runs by default), the newest last.

    A run without an end is "running" where a process of this machine runs it, and else "unfinished":
    `gradstream resume` goes on with it.

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

    from gradstream.run.listing import list_runs
    from gradstream.untrusted import escaped, say

    found = list_runs(folder)
    for run in found:
        if run["damaged"]:
            say(run["damaged"])
    if as_json:
        for run in found:
            click.echo(json.dumps({**run, "path": str(run["path"])}))
        return
    table = Table("run", "status", "strategy", "accuracy", "loss", "samples/s", "time", box=None)
    for run in found:
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
    width = None if sys.stdout.isatty() else 160  # elsewhere nothing is cut off
    Console(highlight=False, width=width).print(table)
