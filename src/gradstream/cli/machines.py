"""The options of runs on several machines, and where the token of a run comes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from gradstream.cli.options import stacked
from gradstream.errors import ConfigError

if TYPE_CHECKING:
    from gradstream.run.remote.listening import Listening
    from gradstream.session.torchrun import Together

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
