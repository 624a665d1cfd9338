"""`gradstream join`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gradstream.cli.machines import token_of, token_options
from gradstream.cli.options import JobCommand, arguments_of_job
from gradstream.errors import ConfigError


@click.command(cls=JobCommand)
@click.argument("address", metavar="ADDR:PORT")
@click.argument("job", metavar="JOB")
@token_options
@click.option("--fingerprint", metavar="sha256:…", help="Fingerprint of the launcher's certificate.")
@click.option("--name", help="Name of this machine; by default its host name.")
@click.option("--insecure", is_flag=True, help="Send plain text; the launcher must have --insecure too.")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Folder for logs.")
def join(
    address: str,
    job: str,
    token: str | None,
    token_file: Path | None,
    fingerprint: str | None,
    name: str | None,
    insecure: bool,
    run_dir: Path | None,
) -> None:
    """Takes part in a run that `gradstream train JOB --listen` has started on another machine.

    That command prints the line to run here. JOB is this machine's copy of the job file, with this
    machine's copy of the data; where either differs from the launcher's, the launcher refuses this
    machine. The exit status is that of the run.

    \b
    Examples:
      gradstream join 10.0.0.1:41873 JOB.py --token 0123… --fingerprint sha256:4567…
      GRADSTREAM_TOKEN=0123… gradstream join 10.0.0.1:41873 JOB.py --fingerprint sha256:4567…
    """
    from gradstream.run.remote.address import Address
    from gradstream.run.remote.join import Joining
    from gradstream.run.remote.join import join as take_part
    from gradstream.untrusted import say

    known = token_of(token, token_file)
    if not known:
        raise ConfigError("join needs the token that the launcher has printed: --token, or GRADSTREAM_TOKEN")
    where = Address.parse(address, "ADDR:PORT")
    if not where.port:
        raise ConfigError(f"{address}: the port is missing; the launcher has printed host:port")
    joining = Joining(
        address=where,
        job=job,
        arguments=arguments_of_job(),
        token=known,
        fingerprint=fingerprint,
        machine=name,
        insecure=insecure,
        run_dir=run_dir,
    )
    sys.exit(take_part(joining, say))
