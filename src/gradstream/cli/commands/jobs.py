"""Commands that make a job, run it, and continue it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradstream.cli.options import (
    LISTEN,
    JobCommand,
    arguments_of_job,
    detach_option,
    job_options,
    json_option,
    listen_options,
    listening_of,
    load_job_with,
    run_argument,
    together_of,
    words_beside,
    words_given,
)
from gradstream.errors import ConfigError

if TYPE_CHECKING:
    from gradstream.job.job import Job
    from gradstream.run.result import Run
    from gradstream.runtime.simulation import SimulationConfig
    from gradstream.telemetry.events import EventDict


# ---- running -----------------------------------------------------------------------------
# Runs a job under a progress display, and prints its figures.

OnEvent = Callable[["EventDict"], None]


def run_and_show(run_job: Callable[[OnEvent], Run], as_json: bool) -> None:
    """Runs a job, with its progress on stderr, and prints its figures on stdout: a table, or one JSON object."""
    from gradstream.cli.report import print_end
    from gradstream.report.progress_line import Display
    from gradstream.run.failures import evaluate

    with redirect_stdout(sys.stderr) if as_json else nullcontext(), Display() as display:
        run = run_job(display.on_event)
    print_end(run, evaluate(run), as_json)


def show_detached(run: Run, as_json: bool) -> None:
    """Prints where a detached run is, and how to follow and stop it."""
    import shlex

    from gradstream.cli.report import print_result

    path = str(run.path)
    rows = [
        ("name", str(run.info.get("name", ""))),
        ("run directory", path),
        ("watch", f"gradstream attach {shlex.quote(path)}"),
        ("stop", f"gradstream stop {shlex.quote(path)}"),
    ]
    print_result(as_json, {"run_dir": path}, rows)


def show_dry_run(job: Job, as_json: bool) -> None:
    """Checks a job by a dry run, and prints the result of each check.

    Raises:
        PreflightError: a check failed. All results are printed by then.
    """
    import dataclasses

    from gradstream.cli.report import print_result
    from gradstream.errors import PreflightError
    from gradstream.preflight import dry_run

    results = dry_run(job)
    rows = [
        (result.name, f"{'ok' if result.ok else 'FAILED':6}  {result.seconds:4.1f} s  {result.detail}")
        for result in results
    ]
    print_result(as_json, list(map(dataclasses.asdict, results)), rows)
    if not as_json:
        click.echo(f"{sum(result.seconds for result in results):.1f} s in all", err=True)
    last = results[-1]
    if not last.ok:
        if last.trace:
            click.echo(f"\n{last.trace.rstrip()}", err=True)
        raise PreflightError(f"the dry run failed at: {last.name}")


# ---- jobs --------------------------------------------------------------------------------


@click.command(cls=JobCommand)
@job_options
@listen_options
@click.option(
    "--engine", metavar="ENGINE", help="Run the nodes in a Ray cluster: ray, ray?cpus=4, ray://HOST:10001."
)
@click.option("--dry-run", is_flag=True, help="Check the job with a few minibatches, and keep nothing.")
@detach_option
def train(job: str, as_json: bool, engine: str | None, dry_run: bool, detach: bool, **options: Any) -> None:
    """Trains with worker and server processes, on this machine or on several.

    With --listen it prints the command that joins another machine, and begins when N machines have
    joined. --workers is the number of workers on all machines together.

    With --dry-run it checks the job and keeps nothing: it builds the model, checks memory and disk,
    then starts processes on this machine that push, fetch, make a checkpoint and evaluate it. Exit
    status 0, or 3 if a check fails.

    If torchrun, srun or Kubernetes has started this command once on each machine, the first process
    trains and the others join it, with the token of GRADSTREAM_TOKEN_FILE; a job that is started again
    continues from its newest checkpoint.

    With --engine ray, or ray://HOST:PORT, the nodes are actors of a Ray cluster, which places them and
    restarts them elsewhere. Its options are those of gradstream.ext.ray.engine.RayEngine.

    Progress goes to stderr, figures to stdout. With --detach it returns at once; the run goes on without
    this terminal, and `gradstream attach` shows its progress.

    \b
    Examples:
      gradstream train JOB.py
      gradstream train JOB.py --dry-run
      gradstream train JOB.py --detach
      gradstream train JOB.py --strategy downpour --set push_every=10 --workers 4
      gradstream train JOB.py --workers 4 -- --hidden 64    # JOB.py finds --hidden 64 in sys.argv
      gradstream train JOB.py --listen 10.0.0.1 --wait 4
      gradstream train JOB.py --workers 4 --engine 'ray?cpus=2'
      gradstream train JOB.py --config slow-network.toml --json > figures.json
    """
    from gradstream._train import train as run_job

    machines = {name: options.pop(name) for name in LISTEN}
    config = options["config"]
    chosen = load_job_with(job, **options)
    if engine is not None:
        from gradstream._train import train_by_engine

        words = words_beside(job, config) + words_given(
            without=("engine", "run_dir", "as_json", "config"),
            not_with="--engine",
            refused=(*LISTEN, "dry_run", "detach"),
        )
        run_and_show(lambda on_event: train_by_engine(chosen, engine, words, on_event=on_event), as_json)
        return
    # The number in a job file is per machine.
    workers = chosen.workers * chosen.split if "workers" in chosen.origins else None
    together = None if machines["listen"] or dry_run else together_of(detach=detach, **machines)
    if together is not None:
        from gradstream.untrusted import say

        if together.place.rank:
            place = together.place  # Ray does not name the job, but gives each process a folder
            own = chosen.run_dir if place.least and not place.job else None
            sys.exit(together.follow(job, arguments_of_job(), say, own))
        run_and_show(lambda on_event: together.lead(chosen, workers=workers, on_event=on_event), as_json)
        return
    listening = listening_of(**machines, workers=workers)
    if dry_run:
        show_dry_run(chosen, as_json)
        return
    if detach:
        show_detached(run_job(chosen, listen=listening, detach=True), as_json)
        return
    run_and_show(lambda on_event: run_job(chosen, on_event=on_event, listen=listening), as_json)


@click.command()
@run_argument
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
@click.option("--from-start", is_flag=True, help="Begin again where all checkpoints are damaged.")
@listen_options
@detach_option
@json_option
def resume(run: Path, as_json: bool, detach: bool, **values: Any) -> None:
    """Continues a run that was stopped or killed from its newest good checkpoint.

    RUN is a run directory. The command reads the job again from its files; neither these nor the data may
    have changed, unless --allow-changed is set. The run continues in the same directory, and repeats the
    steps after the checkpoint. If a checkpoint is damaged, the run continues from the one before; if
    all are damaged, it does not start.

    \b
    Examples:
      gradstream resume runs/20261120-120000-mine
      gradstream resume runs/20261120-120000-mine --workers 4 --servers 2
    """
    from gradstream._resume import resume as resume_run

    listening = listening_of(**{name: values.pop(name) for name in LISTEN}, workers=_processes(values))
    options: Any = {name: value for name, value in values.items() if value is not None}
    if detach:
        show_detached(resume_run(run, listen=listening, detach=True, **options), as_json)
        return
    run_and_show(lambda on_event: resume_run(run, on_event=on_event, listen=listening, **options), as_json)


def _processes(options: dict[str, Any]) -> int | None:
    """Number of processes of all replicas; None if the options do not say it."""
    workers: int | None = options["workers"]
    return None if workers is None else workers * (options["split"] or 1)


@click.command(cls=JobCommand)
@job_options
@click.option(
    "--shape-only", is_flag=True, help="Count time and bytes, without arithmetic: for large models."
)
@click.option("--latency", type=float, metavar="SECONDS", help="Latency from any node to any other.")
@click.option(
    "--bandwidth", type=float, metavar="BYTES/S", help="Bandwidth of a network card, in each direction."
)
@click.option("--gradient-s", type=float, metavar="SECONDS", help="Mean time of one minibatch's gradient.")
@click.option("--jitter", type=float, metavar="SIGMA", help="Log-normal jitter of computing times.")
def simulate(job: str, as_json: bool, **options: Any) -> None:
    """Runs the nodes of a job in one process, on virtual time.

    The same seed gives the same history. Times in the figures are virtual seconds.

    \b
    Examples:
      gradstream simulate JOB.py --workers 16
      gradstream simulate JOB.py --workers 64 --shape-only --bandwidth 12.5e6 --gradient-s 0.1
    """
    from gradstream._simulate import simulate as run_job

    names = ("shape_only", "latency", "bandwidth", "gradient_s", "jitter")
    config = simulation_config_of(**{name: options.pop(name) for name in names})
    chosen = load_job_with(job, **options)
    run_and_show(lambda on_event: run_job(chosen, config=config, on_event=on_event), as_json)


def simulation_config_of(
    *,
    shape_only: bool = False,
    latency: float | None = None,
    bandwidth: float | None = None,
    gradient_s: float | None = None,
    jitter: float | None = None,
) -> SimulationConfig:
    """The default `SimulationConfig` with the values of the command line; None stands for an unset option."""
    import dataclasses

    from gradstream.runtime.simulation import Cost, LogNormal, SimulationConfig

    config = SimulationConfig(shape_only=shape_only)
    network, costs = config.network, dict(config.costs)
    if latency is not None:
        link = dataclasses.replace(network.link, latency_s=latency)
        network = dataclasses.replace(network, link=link)
    if bandwidth is not None:
        network = dataclasses.replace(network, bandwidth_bytes_s=bandwidth)
    if gradient_s is not None:
        costs["gradient"] = Cost(base_s=gradient_s)
    if jitter is not None:
        costs = {kind: dataclasses.replace(cost, jitter=LogNormal(jitter)) for kind, cost in costs.items()}
    return dataclasses.replace(config, network=network, costs=costs)


@click.group()
def config() -> None:
    """Shows the configuration of a job."""


@config.command(cls=JobCommand)
@job_options
def show(job: str, as_json: bool, **options: Any) -> None:
    """Prints the configuration in effect, and the origin of each value.

    The output is TOML, which --config reads. No run is started.

    \b
    Examples:
      gradstream config show JOB.py
      gradstream config show JOB.py --set strategy.push_every=10
      GRADSTREAM_WORKERS=4 gradstream config show JOB.py
    """
    import dataclasses
    import json

    from gradstream.run.planning import plan_run
    from gradstream.run.records import effective, to_toml

    plan = plan_run(load_job_with(job, **options), "config")
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(entry) for entry in effective(plan)]))
    else:
        click.echo(to_toml(plan), nl=False)


@click.command()
@click.argument("name")
@click.option("--torch", "kind", flag_value="torch", default="torch", help="A PyTorch module (the default).")
@click.option("--numpy", "kind", flag_value="numpy", help="Three functions on numpy arrays.")
@click.option("--jax", "kind", flag_value="jax", help="Two functions for JAX.")
def new(name: str, kind: str) -> None:
    """Writes a job file NAME.py that runs unchanged: a model, data, an evaluation.

    \b
    Examples:
      gradstream new mine
      gradstream new mine --numpy
    """
    from importlib import resources

    path = Path(name if name.endswith(".py") else f"{name}.py")
    if not path.stem.isidentifier():
        raise ConfigError(
            f"{path.name}: nodes import the file by its name, which must be letters, digits and _"
        )
    try:
        with open(path, "x", encoding="utf-8") as file:
            text = resources.files("gradstream.cli").joinpath(f"templates/{kind}.py.txt").read_text()
            file.write(text.format(name=path.stem, file=path.name))
    except OSError as error:
        raise ConfigError(f"{path} is not written: {error.strerror}") from error
    click.echo(f"{path} is written. Now: gradstream train {path}")


JOB = "gradstream.cli.demo:job"


@click.command()
@json_option
@click.option(
    "--faults", is_flag=True, help="Kill processes by SIGKILL meanwhile, and show that nothing is lost."
)
@click.option("--seed", default=0, show_default=True, help="Of --faults: draws who is killed, and when.")
@click.pass_context
def demo(context: click.Context, as_json: bool, faults: bool, seed: int) -> None:
    """Trains a small CNN on embedded images with 2 workers and 1 parameter server.

    With --faults, 3 workers and 2 shards train it twice: undisturbed, and while workers, a shard and the coordinator
    are killed. The status is 1 if a sample is lost or counts twice.

    \b
    Examples:
      gradstream demo
      gradstream demo --json
      gradstream demo --faults
    """
    if faults and as_json:
        raise click.UsageError("--faults prints a table and draws a picture: leave out --json")
    if faults:
        from gradstream.cli.demo import run_with_faults

        context.exit(0 if run_with_faults(seed) else 1)
    from gradstream._train import train as run_job
    from gradstream.job.files import load_job

    click.echo(
        "A CNN on 5,000 images of Fashion-MNIST, 16 epochs: 2 workers, 1 parameter server, strategy downpour.",
        err=True,
    )
    job = load_job(JOB)
    run_and_show(lambda on_event: run_job(job, on_event=on_event), as_json)
