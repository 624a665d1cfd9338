"""`gradstream report`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; RUN/report.html by default.",
)
@click.option(
    "--price",
    type=click.FloatRange(min=0),
    metavar="PER_MACHINE_HOUR",
    help="Price of a machine for an hour; the report shows the cost of the run.",
)
@click.option(
    "--tensorboard",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Write TensorBoard event files there, too.",
)
def report(run: Path, output: Path | None, price: float | None, tensorboard: Path | None) -> None:
    """Makes one HTML file of a run: curves, timeline, and why it is slow.

    RUN is a run directory; the run may have failed, or still be going on. The file needs no network.

    \b
    Examples:
      gradstream report runs/20261120-101500-net
      gradstream report runs/20261120-101500-net -o net.html --price 0.35
      gradstream report runs/20261120-101500-net --tensorboard boards/net
    """
    from gradstream.run.result import Run
    from gradstream.trackers.tensorboard import write_run
    from gradstream.untrusted import TEXT_BYTES, escaped

    loaded = Run.load(run)
    click.echo(escaped(str(loaded.report(output or run / "report.html", price=price)), TEXT_BYTES))
    if tensorboard is not None:
        click.echo(escaped(str(write_run(loaded.events, loaded.info, tensorboard)), TEXT_BYTES))
