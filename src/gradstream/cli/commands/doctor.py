"""`gradstream doctor`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradstream.cli.machines import token_of, token_options

if TYPE_CHECKING:
    from gradstream.machine.doctor import DoctorResult

TEXT_BYTES = 4096
MARKS = {"ok": " ", "warning": "!", "failed": "✗"}


@click.command()
@click.argument("address", metavar="[ADDR:PORT]", required=False)
@token_options
@click.option(
    "--fingerprint", metavar="sha256:…", help="Fingerprint of the launcher's certificate, as printed."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder for runs; the current one by default.",
)
def doctor(
    address: str | None,
    token: str | None,
    token_file: Path | None,
    fingerprint: str | None,
    folder: Path,
) -> None:
    """Checks whether this machine can train, alone or with the launcher at ADDR:PORT.

    Without an address, it checks versions, memory, disk, limits and addresses. With the address of a
    launcher that waits or trains, it also checks its name, TCP and TLS; with the token, gRPC, round
    trip, clock, the speed each way and the launcher's versions. Exit status 3 if a check fails.

    \b
    Examples:
      gradstream doctor
      gradstream doctor 10.0.0.1:41873 --token 0123… --fingerprint sha256:4567…
    """
    from gradstream.errors import ConfigError
    from gradstream.machine.doctor import look_here
    from gradstream.untrusted.text import escaped

    findings: Iterable[DoctorResult] = look_here(folder.resolve())
    if address is not None:
        from gradstream.run.remote.address import Address
        from gradstream.run.remote.doctor import Visit, look_there

        where = Address.parse(address, "ADDR:PORT")
        if not where.port:
            raise ConfigError(f"{address}: the port is missing; the launcher has printed host:port")
        known = token_of(token, token_file)
        visit = Visit(address=where, token=known, fingerprint=fingerprint)
        findings = chain(findings, look_there(visit))
    failed = False
    for finding in findings:
        failed |= finding.state == "failed"
        text = escaped(f"{finding.what:<12}{finding.text}", TEXT_BYTES, newlines=True)
        click.echo(f"{MARKS[finding.state]} {text}")
    sys.exit(3 if failed else 0)
