"""Has another machine, or the same one anew, take the place of one that is gone, while the others train."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gradstream.errors import ConfigError
from gradstream.run.ssh.data_delivery import DataDelivery
from gradstream.run.ssh.fleet import Fleet
from gradstream.run.ssh.host import HostError, SshHost
from gradstream.run.ssh.inspection import inspect_machine

NOT_ITS_JOB = "log|status|group|runs|data|data.json"
"""What the folder of the first machine has besides the files of the job, as `grep -E` takes it."""


def replace_machine(fleet: Fleet, old: str, new: str, run: Path, say: Callable[[str], object]) -> Fleet:
    """Has another machine, or the same one anew, take the place of one whose process is gone.

    Job, token and data come from the first machine: this one need not have them any more.

    Args:
        fleet: the machines of the run.
        old: name of the machine that is gone; not the first one.
        new: name of the machine that takes its place.
        run: the local folder of the run, where the new list of machines is written.
        say: is given lines for people to read.

    Returns:
        The machines from now on.

    Raises:
        ConfigError: there is no such machine, or its process runs.
        HostError: the new one lacks something; the run is as before.
    """
    if old not in fleet.hosts[1:]:
        raise ConfigError(
            f"the run has no machine {old!r} that joined it; expected one of {', '.join(fleet.hosts[1:])}"
        )
    if new != old and new in fleet.hosts:
        raise ConfigError(f"{new} has a part in the run already; name another machine")
    if fleet.states()[old].startswith("runs"):
        raise ConfigError(
            f"{old} trains; end its `gradstream train` there before another machine takes its place"
        )
    after = replace(fleet, hosts=[new if name == old else name for name in fleet.hosts])
    host = after.machines[after.hosts.index(new)]
    if new == old:
        fleet.clean([host])
    made: list[SshHost] = []
    try:
        inspect_machine(after, host, made)
        _bring_job(after, host)
        if after.data:
            DataDelivery(after, say).bring_anew(host)
        after.start_on(host)
    except HostError:
        after.clean(made)
        raise
    after.write(run)
    if new != old:
        fleet.clean([fleet.machines[fleet.hosts.index(old)]])  # if it can be reached
    return after


def _bring_job(fleet: Fleet, host: SshHost) -> None:
    """Brings the files of the job and the token from the first machine."""
    first = fleet.machines[0]
    words = first.words(fleet.inside(first, f"tar -cf - $(ls | grep -vxE '{NOT_ITS_JOB}')"))
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as archive:
        assert archive.stdout is not None
        host.do(fleet.inside(host, "umask 077; tar -xf -"), archive.stdout, 600.0)
