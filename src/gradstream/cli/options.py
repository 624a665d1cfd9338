"""The options that several commands share, and how they are applied to a job."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from gradstream.errors import ConfigError

if TYPE_CHECKING:
    from gradstream.job.job import Job
    from gradstream.run.remote.listening import Listening
    from gradstream.session.torchrun import Together


Command = TypeVar("Command", bound=Callable[..., Any])

FILE = "gradstream.toml"
"""Name of the file with settings for all jobs in its folder."""

KEYS = {"algorithm": "strategy.algorithm", "lr": "optimizer.lr", "tracker": "trackers"}
"""Keys of settings that differ from the name of their option."""

ARGUMENTS = f"{__name__}.arguments"


class JobCommand(click.Command):
    """A command that takes a job; words after "--" are arguments of the job file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the words up to "--" as click does."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[ARGUMENTS] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The usage line of click, with the arguments of the job file."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS OF JOB]"]


def arguments_of_job() -> list[str]:
    """The words after "--" on the command line of the current command."""
    context = click.get_current_context(silent=True)
    return [] if context is None else context.meta.get(ARGUMENTS, [])


def words_beside(spec: str, config: Path | None) -> list[str]:
    """The option --config for another machine, which has the folder of the job file.

    Raises:
        ConfigError: the file is elsewhere.
    """
    from gradstream.errors import ConfigError

    if config is None:
        return []
    folder = Path(spec.partition(":")[0]).resolve().parent
    try:
        return ["--config", str(config.resolve().relative_to(folder))]
    except ValueError:
        raise ConfigError(
            f"--config {config}: the nodes get {folder}, the folder of the job file, and it is not in there; copy it"
        ) from None


def words_given(*, without: Sequence[str], not_with: str, refused: Sequence[str]) -> list[str]:
    """The options set on the current command line, as words.

    Args:
        without: names of options to omit.
        not_with: an option that excludes others.
        refused: names of these others.

    Raises:
        ConfigError: one of the refused options is set.
    """
    from gradstream.errors import ConfigError

    words: list[str] = []
    context = click.get_current_context()
    for param in context.command.params:
        name = str(param.name)
        typed = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not isinstance(param, click.Option) or not typed or name in without:
            continue
        if name in refused:
            raise ConfigError(
                f"{param.opts[0]} with {not_with}: the engine decides that; leave one of the two out"
            )
        value = context.params[name]
        if param.is_flag:
            words.append(param.opts[0])
            continue
        for each in value if param.multiple else [value]:
            words += [param.opts[0], str(each)]
    return words


def stacked(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """One decorator for several, whose options help shows in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


run_argument = click.argument("run", type=click.Path(path_type=Path, file_okay=False), metavar="RUN")
detach_option = click.option("--detach", is_flag=True, help="Return at once; the run goes on by itself.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
job_options = stacked(
    click.argument("job", metavar="JOB"),
    click.option("--strategy", metavar="NAME", help="Name, or file.py:Class."),
    click.option(
        "--algorithm", metavar="NAME", help="Algorithm of strategies without a server: ring, for example."
    ),
    click.option("--optimizer", metavar="NAME", help="Name of an update rule: adam, for example."),
    click.option("--codec", metavar="NAME", help="Codec of what workers send: int8 or top-k, for example."),
    click.option("--lr", type=float, help="Learning rate of the optimizer."),
    click.option("--workers", type=int, help="Number of replicas of the model."),
    click.option("--servers", type=int, help="Number of shards of the parameter server."),
    click.option(
        "--split", type=int, help="Number of processes that hold one replica of the model together."
    ),
    click.option(
        "--acknowledge",
        metavar="LEVEL",
        help="When shards acknowledge a push: applied, or with a backup: replicated, logged.",
    ),
    click.option("--batch-size", type=int, help="Samples per minibatch of one worker."),
    click.option("--epochs", type=int, help="Passes over the data."),
    click.option(
        "--steps",
        type=int,
        help="Steps of each worker, instead of --epochs: minibatches, or rounds under strategies in rounds.",
    ),
    click.option("--device", metavar="NAME", help="Device of the workers: cpu, cuda, cuda:1, auto."),
    click.option("--carrier", metavar="NAME", help="Carrier of chunks: auto, grpc, tcp, shm."),
    click.option("--seed", type=int, help="Seed of parameters, order of samples and dropout."),
    click.option(
        "--tracker",
        metavar="NAME",
        multiple=True,
        help="Service to send the curves to: wandb, mlflow, trackio.",
    ),
    click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Directory of the run."),
    click.option(
        "--allow-lost",
        is_flag=True,
        default=None,
        help="Finish the run even if a lost worker's own loop leaves data undone.",
    ),
    click.option(
        "--allow-changed",
        is_flag=True,
        default=None,
        help="Where a run goes on: with the files of the job, and the data, as they are now.",
    ),
    click.option(
        "--record", is_flag=True, default=None, help="Record the order of events, for gradstream replay."
    ),
    click.option("--noise-scale", is_flag=True, default=None, help="Measure how many samples a step pay."),
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
    json_option,
)
"""The argument JOB and the options of a command that runs a job; see `load_job_with`."""


def load_job_with(
    spec: str, *, config: Path | None = None, settings: Sequence[str] = (), **options: Any
) -> Job:
    """Loads the job that a spec names, and applies the user's settings to it.

    Of these sources, a later one overrides those before it: the job file, a TOML file, the environment, the
    command line.

    Args:
        spec: as for `gradstream.job.files.load_job`.
        config: the TOML file; None takes the file beside the job, if there is one.
        settings: texts "key=value".
        options: values of the other options, by name; None for an unset option.

    Raises:
        ConfigError: there is no such job, a key is unknown, or a value has a wrong type.
    """
    from gradstream.job.files import load_job
    from gradstream.job.settings import Setting, apply, from_environment, from_texts, from_toml

    typed = [
        Setting(KEYS.get(name, name), value, f"--{name.replace('_', '-')}")
        for name, value in options.items()
        if value not in (None, ())
    ]
    texts = from_texts(settings)  # raises before the job file is run
    path = config or _beside(spec)
    layers = [from_toml(path) if path else [], from_environment(os.environ), [*typed, *texts]]
    here = Path.cwd()
    job = apply(load_job(spec, argv=[spec.partition(":")[0], *arguments_of_job()]), layers)
    if (
        job.run_dir is not None and "run_dir" in job.origins
    ):  # the job file may have changed the working directory
        job = dataclasses.replace(job, run_dir=here / job.run_dir)
    return job


def _beside(spec: str) -> Path | None:
    """The settings file beside a job file; for a module, in the current folder."""
    place = spec.partition(":")[0]
    path = (Path(place).parent if place.endswith(".py") else Path()) / FILE
    return path if path.is_file() else None


# ---- machines ----------------------------------------------------------------------------
# The options of runs on several machines, and where the token of a run comes from.

TOKEN = "GRADSTREAM_TOKEN"
"""Name of the environment variable that may hold the token."""


LISTEN = ("listen", "wait", "workers_per_machine", "servers_on", "wait_s", "insecure", "token_file")
"""Names of the options of `listen_options`."""

listen_options = stacked(
    click.option(
        "--listen", metavar="ADDR[:PORT]", help="Train on several machines, which reach this one at ADDR."
    ),
    click.option(
        "--wait",
        type=int,
        metavar="N",
        help="Number of machines, this one included; --workers defaults to N.",
    ),
    click.option(
        "--workers-per-machine",
        type=int,
        metavar="K",
        help="Workers on each machine; --workers defaults to N x K.",
    ),
    click.option(
        "--servers-on",
        type=click.Choice(["all", "launcher"]),
        help="Machines that run shards: all of them, or the launcher's alone.",
    ),
    click.option(
        "--wait-s", type=float, metavar="SECONDS", help="Longest wait for the other machines (600)."
    ),
    click.option("--insecure", is_flag=True, help="With --listen: send plain text, without certificates."),
    click.option(
        "--token-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"File that holds the token; or set {TOKEN}.",
    ),
)
"""The options of a command that starts runs on several machines."""

token_options = stacked(
    click.option("--token", help=f"Token that the launcher has printed; or set {TOKEN}."),
    click.option(
        "--token-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File that holds the token; `ps` does not show the token then.",
    ),
)
"""The options of a command that needs a token."""


def token_of(token: str | None, file: Path | None) -> str | None:
    """The token from --token, the file, or the environment; None if there is none.

    Raises:
        ConfigError: the file cannot be read.
    """
    if token is not None:
        return token
    from gradstream.run.remote.address import token_in, token_of_environment

    return token_of_environment(os.environ) if file is None else token_in(file, "--token-file")


def listening_of(
    *,
    listen: str | None,
    wait: int | None,
    workers_per_machine: int | None,
    servers_on: Literal["all", "launcher"] | None,
    wait_s: float | None,
    insecure: bool,
    token_file: Path | None,
    workers: int | None,
) -> Listening | None:
    """How other machines join the run, by the options; None if the run is on this machine alone.

    Raises:
        ConfigError: an option needs --listen, or the numbers of machines and workers contradict each other.
    """
    from gradstream.run.remote.address import Address
    from gradstream.run.remote.listening import Listening, workers_each

    if listen is None:
        asked = {
            "--wait": wait,
            "--workers-per-machine": workers_per_machine,
            "--servers-on": servers_on,
            "--insecure": insecure or None,
        }
        for option, value in asked.items():
            if value is not None:
                raise ConfigError(
                    f"{option} needs --listen ADDR, the address at which other machines reach this one"
                )
        return None
    machines = 2 if wait is None else wait
    return Listening(
        address=Address.parse(listen, "--listen"),
        machines=machines,
        workers_per_machine=workers_each(machines, workers_per_machine, workers),
        servers_on=servers_on or "all",
        insecure=insecure,
        token=token_of(None, token_file),
        wait_s=600.0 if wait_s is None else wait_s,
    )


def together_of(
    *,
    workers_per_machine: int | None,
    servers_on: Literal["all", "launcher"] | None,
    wait_s: float | None,
    insecure: bool,
    token_file: Path | None,
    detach: bool,
    **_: object,
) -> Together | None:
    """How this process joins a run whose processes torchrun, srun or Kubernetes started; None if none of them did.

    Raises:
        ConfigError: an option conflicts with that.
    """
    from gradstream.run.place import place_of

    place = place_of(os.environ)
    if place is None:
        return None
    from gradstream.session.torchrun import Together

    for option, is_given in (("--insecure", insecure), ("--detach", detach)):
        if is_given:
            raise ConfigError(
                f"{option} in a process that {place.engine} has started: it watches this process, and the processes "
                "find one another by a signed message over TLS; leave the option out"
            )
    return Together(
        place=place,
        workers_per_machine=workers_per_machine,
        servers_on=servers_on or "launcher",
        wait_s=600.0 if wait_s is None else wait_s,
        token=token_of(None, token_file),
    )
