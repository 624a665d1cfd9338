"""Options that commands share, and the job that they make: layer over layer of settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from gradstream.job.job import Job

__all__ = ["JobCommand", "arguments_of_job", "config_options", "job_options", "json_option", "load_job_with"]

Command = TypeVar("Command", bound=Callable[..., Any])

FILE = "gradstream.toml"
"""Settings of all jobs in its folder."""

KEYS = {"algorithm": "strategy.algorithm", "lr": "optimizer.lr", "tracker": "trackers"}
"""Options whose key has another name."""


ARGUMENTS = f"{__name__}.arguments"


class JobCommand(click.Command):
    """A command about a job: what comes after "--" are the arguments of the job file, not its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, with the words up to "--"."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[ARGUMENTS] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """As click has them, with what may follow."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS OF JOB]"]


def arguments_of_job() -> list[str]:
    """What the command line that is being carried out has after "--"."""
    context = click.get_current_context(silent=True)
    return [] if context is None else context.meta.get(ARGUMENTS, [])


def job_options(command: Command) -> Command:
    """The argument JOB and the options of every command that runs one; see `load_job_with`."""
    return _decorated(command, [*_job_options(), json_option])


def config_options(command: Command) -> Command:
    """The same without --json."""
    return _decorated(command, _job_options())


def _job_options() -> list[Callable[[Any], Any]]:
    return [
        click.argument("job", metavar="JOB"),
        click.option("--strategy", metavar="NAME", help="Name, or file.py:Class."),
        click.option("--algorithm", metavar="NAME", help="How workers sum without a server: ring."),
        click.option("--optimizer", metavar="NAME", help="Name of an update rule: adam."),
        click.option("--lr", type=float, help="Learning rate of the optimizer."),
        click.option("--workers", type=int, help="How many replicas of the model."),
        click.option("--servers", type=int, help="How many shards of the parameter server."),
        click.option("--batch-size", type=int, help="Samples per minibatch of one worker."),
        click.option("--epochs", type=int, help="Passes over the data."),
        click.option("--steps", type=int, help="Minibatches per worker, instead of --epochs."),
        click.option("--device", metavar="NAME", help="What workers compute on: cpu, cuda, cuda:1, auto."),
        click.option("--carrier", metavar="NAME", help="What chunks travel by: auto, grpc, tcp, shm."),
        click.option("--seed", type=int, help="Of parameters, order of samples and dropout."),
        click.option(
            "--tracker", metavar="NAME", multiple=True, help="Curves go there, too: wandb, mlflow, trackio."
        ),
        click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Where it is kept."),
        click.option(
            "--allow-lost", is_flag=True, default=None, help="Go without what a lost worker's loop had left."
        ),
        click.option("--record", is_flag=True, default=None, help="So that it can be replayed."),
        click.option(
            "--set",
            "settings",
            metavar="KEY=VALUE",
            multiple=True,
            help="Any field of the job, its strategy or optimizer: strategy.push_every=10.",
        ),
        click.option(
            "--config",
            type=click.Path(path_type=Path, dir_okay=False, exists=True),
            help=f"TOML file of such fields, instead of {FILE} beside the job.",
        ),
    ]


def _decorated(command: Command, options: Sequence[Callable[[Any], Any]]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def json_option(command: Command) -> Command:
    """The option --json."""
    return click.option("--json", "as_json", is_flag=True, help="Figures as one JSON object.")(command)


def load_job_with(
    spec: str, *, config: Path | None = None, settings: Sequence[str] = (), **given: Any
) -> Job:
    """The job that a spec names, under all settings that are there for it.

    Later ones are stronger: the job file, a TOML file, the environment, the command line.

    Args:
        spec: as for `gradstream.job.files.load_job`.
        config: the TOML file; None is the one beside the job, if there is one.
        settings: "key=value".
        given: other options by name; None is not given.

    Raises:
        ConfigError: no such job, an unknown key, a value of the wrong type.
    """
    from gradstream.job.files import load_job
    from gradstream.job.settings import Setting, apply, from_environment, from_texts, from_toml

    typed = [
        Setting(KEYS.get(name, name), value, f"--{name.replace('_', '-')}")
        for name, value in given.items()
        if value not in (None, ())
    ]
    texts = from_texts(settings)  # wrong ones are said before the job file is run
    path = config or _beside(spec)
    layers = [from_toml(path) if path else [], from_environment(os.environ), [*typed, *texts]]
    return apply(load_job(spec, argv=[spec.partition(":")[0], *arguments_of_job()]), layers)


def _beside(spec: str) -> Path | None:
    """The settings file in the folder of a job file; of a module, in the current one."""
    place = spec.partition(":")[0]
    path = (Path(place).parent if place.endswith(".py") else Path()) / FILE
    return path if path.is_file() else None
