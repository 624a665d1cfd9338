"""`gradstream trace`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; RUN/trace.json by default.",
)
def trace(run: Path, output: Path | None) -> None:
    """Makes a Chrome trace of a run: when each worker computed, waited, pushed and fetched.

    Open the file at https://ui.perfetto.dev (it stays on your machine) or in chrome://tracing.

    \b
    Examples:
      gradstream trace runs/20261120-101500-net
      gradstream trace runs/20261120-101500-net -o net.json
    """
    from gradstream.run.result import Run
    from gradstream.untrusted import TEXT_BYTES, escaped

    click.echo(escaped(str(Run.load(run).trace(output or run / "trace.json")), TEXT_BYTES))
