"""The commands `gradstream train`, `gradstream simulate` and `gradstream demo`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gradstream.errors import ConfigError, GradstreamError, exit_code

if TYPE_CHECKING:
    from gradstream.config import Job
    from gradstream.run import Run
    from gradstream.runtime.world import World
    from gradstream.summary import EventDict

__all__ = ["main"]

Command = TypeVar("Command", bound=Callable[..., Any])
OnEvent = Callable[["EventDict"], None]

DEMO = "gradstream.demo:job"


class _Group(click.Group):
    """Turns our exceptions into messages and exit codes: 2 usage, 1 any other, 130 Ctrl-C."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GradstreamError as error:
            from gradstream.cli.report import error_text

            click.echo(error_text(error), err=True)
            ctx.exit(exit_code(error))
        except KeyboardInterrupt as error:
            click.echo("interrupted", err=True)
            ctx.exit(exit_code(error))


def job_options(command: Command) -> Command:
    """The options of every command that runs a job: each overrides a field of the job."""
    options = [
        click.argument("job", metavar="JOB"),
        click.option("--strategy", metavar="NAME", help="Name, or file.py:Class."),
        click.option("--optimizer", metavar="NAME", help="Name of an update rule: adam."),
        click.option("--lr", type=float, help="Learning rate of the optimizer."),
        click.option("--workers", type=int, help="How many replicas of the model."),
        click.option("--servers", type=int, help="How many shards of the parameter server."),
        click.option("--batch-size", type=int, help="Samples per minibatch of one worker."),
        click.option("--epochs", type=int, help="Passes over the data."),
        click.option("--steps", type=int, help="Minibatches per worker, instead of --epochs."),
        click.option("--seed", type=int, help="Of parameters, order of samples and dropout."),
        click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Where it is kept."),
        click.option(
            "--set", "settings", metavar="FIELD=VALUE", multiple=True, help="Of the strategy: push_every=10."
        ),
        json_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def json_option(command: Command) -> Command:
    """The option --json."""
    return click.option("--json", "as_json", is_flag=True, help="Figures as one JSON object.")(command)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gradstream")
def main() -> None:
    """Trains one model on many machines that may be slow, far apart, and dying.

    A JOB is a file that defines job() or calls gradstream.train(...), or file.py:function, or
    module:function.
    """


@main.command()
@job_options
def train(job: str, as_json: bool, **given: Any) -> None:
    """Trains with worker and server processes on this machine.

    Progress goes to stderr, figures to stdout.
    """
    from gradstream.jobfile import load_job
    from gradstream.train import train as run_job

    chosen = override(load_job(job), **given)
    _run(lambda on_event: run_job(chosen, on_event=on_event), as_json)


@main.command()
@job_options
@click.option("--phantom", is_flag=True, help="No arithmetic: cost and bytes only, for large models.")
@click.option("--latency", type=float, metavar="SECONDS", help="From any node to any other.")
@click.option("--bandwidth", type=float, metavar="BYTES/S", help="Of each direction of a network card.")
@click.option("--gradient-s", type=float, metavar="SECONDS", help="Mean time of one minibatch's gradient.")
@click.option("--spread", type=float, metavar="SIGMA", help="Log-normal spread of computing times.")
def simulate(job: str, as_json: bool, **given: Any) -> None:
    """Runs the same nodes in one process, on virtual time.

    One seed is one history. Times in the figures are virtual seconds.
    """
    from gradstream.jobfile import load_job
    from gradstream.simulate import simulate as run_job

    names = ("phantom", "latency", "bandwidth", "gradient_s", "spread")
    world = make_world(**{name: given.pop(name) for name in names})
    chosen = override(load_job(job), **given)
    _run(lambda on_event: run_job(chosen, world=world, on_event=on_event), as_json)


@main.command()
@json_option
def demo(as_json: bool) -> None:
    """Trains a small CNN on embedded images with 2 workers and 1 parameter server."""
    from gradstream.jobfile import load_job
    from gradstream.train import train as run_job

    click.echo(
        "A CNN on Fashion-MNIST (5,000 images): 2 workers, 1 parameter server, strategy downpour.", err=True
    )
    job = load_job(DEMO)
    _run(lambda on_event: run_job(job, on_event=on_event), as_json)


def override(job: Job, *, lr: float | None = None, settings: Sequence[str] = (), **given: Any) -> Job:
    """The job with the fields that were given on the command line; None is not given.

    Args:
        lr: learning rate, of whichever optimizer the job then has.
        settings: "field=value" of whichever strategy the job then has.

    Raises:
        ConfigError: an unknown name or option. What does not fit together, the job refuses later.
    """
    import dataclasses

    from gradstream.registry import find_optimizer, find_strategy

    fields = {name: value for name, value in given.items() if value is not None}
    if "steps" in fields or "epochs" in fields:
        fields = {"steps": None, "epochs": None, **fields}
    if "strategy" in fields:
        fields["strategy_options"] = {}  # those of the job were another strategy's
    job = dataclasses.replace(job, **fields)
    if settings:
        options = {**job.strategy_options, **dict(map(_setting, settings))}
        job = dataclasses.replace(job, strategy_options=options)
    if lr is not None:
        optimizer = job.optimizer or find_strategy(job.strategy, job.strategy_options).optimizer()
        job = dataclasses.replace(job, optimizer=find_optimizer(optimizer, {"lr": lr}))
    return job


def _setting(text: str) -> tuple[str, Any]:
    """("push_every", 10) of "push_every=10": the value is a number, true or false, or a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: expected field=value, such as push_every=10")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def make_world(
    *,
    phantom: bool = False,
    latency: float | None = None,
    bandwidth: float | None = None,
    gradient_s: float | None = None,
    spread: float | None = None,
) -> World:
    """The default `World` with what was given on the command line; None is not given."""
    import dataclasses

    from gradstream.runtime.world import Cost, LogNormal, World

    world = World(phantom=phantom)
    network, costs = world.network, dict(world.costs)
    if latency is not None:
        link = dataclasses.replace(network.link, latency_s=latency)
        network = dataclasses.replace(network, link=link)
    if bandwidth is not None:
        network = dataclasses.replace(network, bandwidth_bytes_s=bandwidth)
    if gradient_s is not None:
        costs["gradient"] = Cost(base_s=gradient_s)
    if spread is not None:
        costs = {kind: dataclasses.replace(cost, spread=LogNormal(spread)) for kind, cost in costs.items()}
    return dataclasses.replace(world, network=network, costs=costs)


def _run(run_job: Callable[[OnEvent], Run], as_json: bool) -> None:
    """Runs a job under a progress display, then says what came of it on stdout."""
    from gradstream.cli.display import Display
    from gradstream.cli.report import evaluate, json_text, show

    with Display() as display:
        run = run_job(display.on_event)
    evaluation = evaluate(run)
    if as_json:
        click.echo(json_text(run, evaluation))
    else:
        show(run, evaluation)
