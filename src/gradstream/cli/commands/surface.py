"""`gradstream surface`."""

from __future__ import annotations

from pathlib import Path

import click

from gradstream.cli.options import json_option

PLOTS = (".png", ".svg", ".pdf")
"""Endings of files that it draws."""


@click.command()
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--points", type=int, help="On the line (25 by default), or on each side of the plane (11).")
@click.option("--workers", type=int, default=1, help="Processes that compute the loss.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("surface.png"),
    help="The plot: PNG, SVG or PDF.",
)
@json_option
def surface(runs: tuple[Path, ...], points: int | None, workers: int, output: Path, as_json: bool) -> None:
    """Draws the training loss on the line through two runs, or on the plane through three.

    All must have trained the job of the first one.

    \b
    Examples:
      gradstream surface runs/small-batch runs/large-batch --workers 4
      gradstream surface runs/a runs/b runs/c --output plane.svg
    """
    import json

    from gradstream.analysis.ranks import full_loss, parameters_of
    from gradstream.analysis.surface import surface as measure
    from gradstream.cli.report import print_rows
    from gradstream.errors import ConfigError

    if output.suffix.lower() not in PLOTS:
        raise ConfigError(f"--output {output}: expected a file whose name ends with {', '.join(PLOTS)}")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}; make it first")
    with full_loss(runs[0], workers=workers) as loss:
        if loss is None:  # another rank of torchrun
            return
        found = measure(loss, [parameters_of(run, loss.model) for run in runs], points=points)
    found.draw(output, [run.name for run in runs])
    if as_json:
        axes = [axis.tolist() for axis in found.axes]
        record = {"points": found.points.tolist(), "axes": axes, "losses": found.losses.tolist()}
        click.echo(json.dumps(record))
    else:
        print_rows(
            [
                ("least loss", f"{found.losses.min():.4g}"),
                ("largest loss", f"{found.losses.max():.4g}"),
                ("plot", str(output)),
            ]
        )
