"""Options that commands share, and what they make of a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gradstream.errors import ConfigError

if TYPE_CHECKING:
    from gradstream.config import Job

__all__ = ["job_options", "json_option", "override"]

Command = TypeVar("Command", bound=Callable[..., Any])


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
