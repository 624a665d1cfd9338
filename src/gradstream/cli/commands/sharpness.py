"""`gradstream sharpness`."""

from __future__ import annotations

from pathlib import Path

import click

from gradstream.cli.options import json_option


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint", metavar="NAME", help="step-…, or final. By default as in `gradstream evaluate`."
)
@click.option("--epsilon", type=float, multiple=True, help="Size of the box. By default 1e-3 and 5e-4.")
@click.option(
    "--subspace", type=int, metavar="P", help="Search in P random directions, not in the whole space."
)
@click.option(
    "--seed", type=int, default=0, help="Of the directions, and of the point where the search begins."
)
@click.option("--workers", type=int, default=1, help="Processes that compute the loss.")
@json_option
def sharpness(
    run: Path,
    checkpoint: str | None,
    epsilon: tuple[float, ...],
    subspace: int | None,
    seed: int,
    workers: int,
    as_json: bool,
) -> None:
    """Measures how much the training loss grows in a small box around the parameters of a run.

    A value is in percent of 1 + loss (Keskar et al., 2017). L-BFGS-B searches the box, which takes some 12 passes over
    all training samples for each epsilon. Under torchrun, its processes compute the loss, on any number of machines.

    \b
    Examples:
      gradstream sharpness runs/20261120-120000-mine --workers 4
      gradstream sharpness runs/20261120-120000-mine --subspace 100 --json
    """
    import dataclasses
    import json

    from gradstream.analysis.ranks import full_loss, parameters_of
    from gradstream.analysis.sharpness import sharpness as measure
    from gradstream.cli.report import print_rows

    with full_loss(run, checkpoint=checkpoint, workers=workers) as loss:
        if loss is None:  # another rank of torchrun
            return
        x = parameters_of(run, loss.model, checkpoint)
        found = [
            measure(loss, x, epsilon=one, subspace=subspace, seed=seed) for one in epsilon or (1e-3, 5e-4)
        ]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(one) for one in found]))
    else:
        rows = [(f"sharpness, epsilon {one.epsilon:g}", f"{one.value:.4g} %") for one in found]
        print_rows(
            [*rows, ("loss", f"{found[0].loss:.4g}"), ("passes", str(sum(one.passes for one in found)))]
        )
