"""Commands that show the results of a run, and where its time went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gradstream.cli.options import json_option, run_argument


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

    RUN is a run directory; the run may have failed, or may still be going on. The file needs no network.

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


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    metavar="NAME",
    help="step-…, best or final. By default the final parameters, or else the newest checkpoint.",
)
@click.option("--data", metavar="DATA", help="Another data set: a name, or file.py:function.")
@json_option
def evaluate(run: Path, checkpoint: str | None, data: str | None, as_json: bool) -> None:
    """Evaluates the parameters of a run on the held-out samples of its data.

    RUN is a run directory. The command reads the job again from its file, which must not have changed.
    If the run failed, it evaluates the newest checkpoint.

    \b
    Examples:
      gradstream evaluate runs/20261120-120000-mine
      gradstream evaluate runs/20261120-120000-mine --checkpoint step-00000400
      gradstream evaluate runs/20261120-120000-mine --data other.py:holdout
    """
    import dataclasses

    from gradstream.cli.report import evaluation_rows, print_result
    from gradstream.job.registry import find_dataset
    from gradstream.run.failures import keep_evaluation
    from gradstream.run.result import FINAL_MODEL, reopen

    opened, file = reopen(run, checkpoint=checkpoint, data=None if data is None else find_dataset(data))
    evaluation = opened.evaluate()
    if data is None and file == run / FINAL_MODEL:
        keep_evaluation(opened, evaluation)
    record = {"parameters": str(file), "evaluation": dataclasses.asdict(evaluation)}
    print_result(as_json, record, [*evaluation_rows(evaluation), ("parameters", str(file))])


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--checkpoint", metavar="NAME", help="step-…, best or final. By default as in `gradstream evaluate`."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "dcp"]),
    default="safetensors",
    help="safetensors (default), as Hugging Face keeps models; or dcp, a distributed checkpoint of torch.",
)
@click.option("--module", default="", metavar="NAME", help="Part of the model to write alone: backbone, say.")
@click.option(
    "--shard-size",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    metavar="GB",
    help="Most gigabytes of a safetensors file; 5 by default.",
)
def export(
    run: Path, folder: Path, checkpoint: str | None, form: Any, module: str, shard_size: float
) -> None:
    """Writes the parameters of a run into FOLDER, for other software.

    RUN is a run directory; the run may have failed. FOLDER is made. A model of transformers gets its config.json:
    from_pretrained(FOLDER) loads it. With --format dcp, the state of the loop's optimizers is there too.

    \b
    Examples:
      gradstream export runs/20261120-120000-mine mine
      gradstream export runs/20261120-120000-mine mine --checkpoint step-00000400 --shard-size 2
      gradstream export runs/20261120-120000-mine mine-dcp --format dcp
    """
    from gradstream.checkpoints import export as write
    from gradstream.untrusted import TEXT_BYTES, escaped

    for file in write(run, folder, checkpoint, form=form, module=module, shard_bytes=int(shard_size * 1e9)):
        click.echo(escaped(str(file), TEXT_BYTES))


@click.command()
@run_argument
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
    version on which it was computed, and the version to which it was applied. Without an update to stop at,
    it replays to the end, and compares the parameters with those that the run kept.

    \b
    Examples:
      gradstream replay runs/20261120-120000-mine
      gradstream replay runs/20261120-120000-mine --watch
      gradstream replay runs/20261120-120000-mine --worker 2 --step 120
      gradstream replay runs/20261120-120000-mine --find nan
    """
    from gradstream.cli.replaying import ReplayQuery, show_replay

    show_replay(run, ReplayQuery(**place), watch=watch, anyway=anyway, as_json=as_json)


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

    from gradstream.cli.report import print_result
    from gradstream.ext.analysis.full_loss import full_loss, parameters_of
    from gradstream.ext.analysis.sharpness import sharpness as measure

    with full_loss(run, checkpoint=checkpoint, workers=workers) as loss:
        if loss is None:  # this is another rank of torchrun
            return
        x = parameters_of(run, loss.model, checkpoint)
        measured = [
            measure(loss, x, epsilon=size, subspace=subspace, seed=seed) for size in epsilon or (1e-3, 5e-4)
        ]
    rows = [
        (f"sharpness, epsilon {sharpness.epsilon:g}", f"{sharpness.value:.4g} %") for sharpness in measured
    ]
    rows += [
        ("loss", f"{measured[0].loss:.4g}"),
        ("passes", str(sum(sharpness.passes for sharpness in measured))),
    ]
    print_result(as_json, list(map(dataclasses.asdict, measured)), rows)


PLOTS = (".png", ".svg", ".pdf")
"""File name extensions of the plots that it draws."""


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

    All runs must have trained the job of the first one.

    \b
    Examples:
      gradstream surface runs/small-batch runs/large-batch --workers 4
      gradstream surface runs/a runs/b runs/c --output plane.svg
    """
    from gradstream.cli.report import print_result
    from gradstream.errors import ConfigError
    from gradstream.ext.analysis.full_loss import full_loss, parameters_of
    from gradstream.ext.analysis.surface import surface as measure

    if output.suffix.lower() not in PLOTS:
        raise ConfigError(f"--output {output}: expected a file whose name ends with {', '.join(PLOTS)}")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}; make it first")
    with full_loss(runs[0], workers=workers) as loss:
        if loss is None:  # this is another rank of torchrun
            return
        drawn = measure(loss, [parameters_of(run, loss.model) for run in runs], points=points)
    drawn.draw(output, [run.name for run in runs])
    axes, losses = [axis.tolist() for axis in drawn.axes], drawn.losses
    rows = [
        ("least loss", f"{losses.min():.4g}"),
        ("largest loss", f"{losses.max():.4g}"),
        ("plot", str(output)),
    ]
    print_result(as_json, {"points": drawn.points.tolist(), "axes": axes, "losses": losses.tolist()}, rows)
