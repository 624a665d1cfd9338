"""`gradstream stop`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option("--now", is_flag=True, help="End it at once, without another checkpoint.")
@click.option(
    "--wait-s", type=float, default=120.0, metavar="SECONDS", help="Longest wait for its end (120)."
)
def stop(run: Path, now: bool, wait_s: float) -> None:
    """Ends a run, detached or not, as Ctrl-C in its terminal does.

    RUN is a run directory. A checkpoint is made first, if the job has any; the command waits for it, and
    says what resumes the run. Exit status 4 if the run has not ended in time.

    \b
    Examples:
      gradstream stop runs/20261120-120000-mine
      gradstream stop runs/20261120-120000-mine --now
    """
    from gradstream.cli.hosts import stop as stop_hosts
    from gradstream.run.ssh.fleet import Fleet

    if fleet := Fleet.of(run):
        stop_hosts(fleet, run, *(["--now"] if now else []), wait_s=wait_s)
        return
    from gradstream.runs import stop as end
    from gradstream.untrusted import TEXT_BYTES, escaped

    click.echo(escaped(end(run, now=now, wait_s=wait_s), TEXT_BYTES))
