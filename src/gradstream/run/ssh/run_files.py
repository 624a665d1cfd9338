"""The run directory of a run over ssh: brought here from the first machine in the end, and back if the run goes on."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from functools import partial
from pathlib import Path

from gradstream.run.files import HOSTS, JOB
from gradstream.run.ssh.archives import unpacked
from gradstream.run.ssh.fleet import NOT_ITS_JOB, Fleet
from gradstream.run.ssh.host import HostError, SshHost

LOGS = "hosts"
"""Folder in the local folder of a run: a folder for each machine, with its log and its exit status."""

BRING_S = 3600.0
"""Longest time in which a run directory has to be on the first machine."""


def collect(fleet: Fleet, run: Path) -> list[str]:
    """Brings what the first machine has in its run directory, and the log of each machine, into a local folder.

    The files of the job come too: what is done with the run later reads them. Checkpoints that the machine has no more
    are removed here, if it has others.

    Returns:
        Why the logs of some machines are not there, a line for each.

    Raises:
        HostError: the run directory could not be brought.
    """
    from gradstream.checkpoint.folder import FOLDER

    first, *_ = fleet.machines
    home = fleet.run_dir
    brought = _bring(first, fleet.inside(first, f"mkdir -p {home} && tar -cf - -C {home} ."), run)
    there = {name for name in brought if name.startswith(f"{FOLDER}/step-") or name == f"{FOLDER}/final"}
    for checkpoint in (run / FOLDER).glob("*") if there else ():
        if checkpoint.is_dir() and f"{FOLDER}/{checkpoint.name}" not in brought:
            shutil.rmtree(checkpoint)

    (run / JOB).mkdir(exist_ok=True)
    _bring(first, fleet.inside(first, f"tar -cf - $(ls | grep -vxE '{NOT_ITS_JOB}|token')"), run / JOB)
    return list(filter(None, fleet.at_once(partial(bring_log, fleet, run)).values()))


def bring_log(fleet: Fleet, run: Path, host: SshHost) -> str:
    """Brings the log of a machine into the local folder of the run. Returns why it could not; "" if it has."""
    into = run / LOGS / host.name.replace("/", "_")
    into.mkdir(parents=True, exist_ok=True)
    try:
        _bring(host, fleet.inside(host, "tar -cf - $(ls -d log status 2>/dev/null)"), into)
    except HostError as error:
        return str(error)
    return ""


def take_back(fleet: Fleet, run: Path) -> None:
    """Brings the run directory of an earlier start back to the first machine, which goes on from it.

    Raises:
        HostError: it is not there in time, or the machine has no room for it.
    """
    first, *_ = fleet.machines
    here = [f"./{path.name}" for path in run.iterdir() if path.name not in (HOSTS, LOGS, JOB)]
    with subprocess.Popen(["tar", "-cf", "-", "-C", run, *here], stdout=subprocess.PIPE) as archive:
        assert archive.stdout is not None
        script = f"umask 077; mkdir -p {fleet.run_dir} && tar -xf - -C {fleet.run_dir}"
        first.do(fleet.inside(first, script), archive.stdout, BRING_S)
    if archive.returncode:
        raise HostError(f"{run} could not be read: exit status {archive.returncode} of tar")


def _bring(host: SshHost, script: str, into: Path) -> set[str]:
    """Unpacks the archive that a script prints. Returns the names of what was in it."""
    words = host.words(script)
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as archive:
        assert archive.stdout is not None
        try:
            names = unpacked(archive.stdout, into)
        except (OSError, tarfile.TarError) as error:
            raise HostError(f"{host.name}: cannot unpack what it has sent in {into}: {error}") from None
    if archive.returncode:
        raise HostError(f"{host.name}: its files did not come: exit status {archive.returncode} of ssh")
    return names
