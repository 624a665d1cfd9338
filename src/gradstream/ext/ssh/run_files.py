"""The run directory of a run over ssh: fetched from the first machine at the end, sent back to continue."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from gradstream.errors import DataError
from gradstream.ext.ssh.archives import Expected, unpacked
from gradstream.ext.ssh.fleet import LOG_S, Fleet
from gradstream.ext.ssh.host import HostError, SshHost
from gradstream.run.files import BROUGHT, HOSTS, JOB, LOGS

OWN = "own"
"""Folder in the first machine's folder, with other files that the job has written into the run directory."""

BRING_S = 3600.0
"""Longest time to bring a run directory from the first machine, or back."""

LOG_BYTES, STATUS_BYTES = 1 << 30, 64
"""The most bytes of a log, and of an exit status."""

MAX_FILES = 200_000
"""The most files and folders of a run directory."""

FREE_PART = 0.9
"""The part of the free disk that a machine may fill with a run directory."""

_OF_PROCESSES = "coordinator[.]db(-wal|-shm)?|backups|reshard[.]json"
"""Files of the processes of a run, which nobody needs when it is over."""

_TAR = "tar --exclude='.*' --hard-dereference -cf - --verbatim-files-from -T -"


def collect(fleet: Fleet, run: Path) -> list[str]:
    """Brings the first machine's run directory, and the log of each machine, into a local folder.

    Files that do not belong to a run go into `OWN` in the first machine's folder, where no command reads them. The
    checkpoints there replace those here, if any is whole.

    Returns:
        Why the logs of some machines are missing, a line for each.

    Raises:
        HostError: the run directory could not be brought. The local folder is unchanged.
    """
    first, *_ = fleet.machines
    home, known = fleet.run_dir, "|".join(map(re.escape, BROUGHT))
    pack = f"ls | grep -xE {shlex.quote(known)} | {_TAR}"
    with _brought(
        first, fleet.inside(first, f"mkdir -p {home} && cd {home} && {pack}"), run, _files(run, _of_run)
    ) as new:
        for path in list(new.iterdir()):
            if path.name != "checkpoints" or any(path.glob("[!.]*")):
                _put(path, run / path.name)
    lacking = list(filter(None, fleet.at_once(partial(bring_log, fleet, run)).values()))
    others = f"ls | grep -vxE {shlex.quote(f'{known}|{_OF_PROCESSES}')}"
    if first.do(fleet.inside(first, f"cd {home} && {others} | head -n 1")):
        script = fleet.inside(first, f"cd {home} && {others} | {_TAR}")
        with _brought(first, script, run, _files(run, lambda *_: True)) as new:
            _put(new, _folder_of(run, first) / OWN)
    return lacking


def bring_log(fleet: Fleet, run: Path, host: SshHost) -> str:
    """Brings the log of a machine into the local folder of the run. Returns why it could not; "" if it could."""
    script = fleet.inside(host, "tar -cf - $(ls -d log status 2>/dev/null)")
    into = _folder_of(run, host)
    into.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _brought(host, script, into.parent, _LOGS, LOG_S) as new:
            _put(new, into)
    except HostError as error:
        return str(error)
    return ""


def take_back(fleet: Fleet, run: Path) -> None:
    """Brings the run directory of an earlier start back to the first machine, which continues from it.

    Raises:
        HostError: it did not get there in time, or the machine has no room for it.
    """
    first, *_ = fleet.machines
    here = [f"./{path.name}" for path in run.iterdir() if path.name not in (HOSTS, LOGS, JOB)]
    with subprocess.Popen(["tar", "-cf", "-", "-C", run, *here], stdout=subprocess.PIPE) as archive:
        assert archive.stdout is not None
        script = f"umask 077; mkdir -p {fleet.run_dir} && tar -xf - -C {fleet.run_dir}"
        first.do(fleet.inside(first, script), archive.stdout, BRING_S)
    if archive.returncode:
        raise HostError(f"{run} could not be read: exit status {archive.returncode} of tar")


@contextmanager
def _brought(
    host: SshHost, script: str, beside: Path, expected: Expected, longest_s: float = BRING_S
) -> Iterator[Path]:
    """Unpacks the archive that a script prints. The folder with its files exists only inside the context."""
    with tempfile.TemporaryDirectory(dir=beside, prefix=".brought-") as folder:
        new = Path(folder) / "new"
        try:
            with host.printed(script, longest_s) as archive:
                unpacked(archive, new, expected)
        except (OSError, DataError) as error:
            raise HostError(f"{host.name}: what it has sent is not taken: {error}") from None
        yield new


def _put(new: Path, place: Path) -> None:
    """Puts a file or folder in its place. The replaced one is removed with the folder of the new one."""
    if place.is_symlink() or place.exists():
        place.rename(new.with_name(f"{new.name}.before"))
    new.rename(place)


def _files(run: Path, admits: Callable[[str, int], bool]) -> Expected:
    """An archive of files of a run directory, which may not fill the disk."""
    free_bytes = shutil.disk_usage(run).free
    return Expected(admits=admits, max_members=MAX_FILES, max_bytes=int(FREE_PART * free_bytes))


def _of_run(name: str, length: int) -> bool:
    first, *rest = name.split("/")
    return first in BROUGHT and bool(rest) is ("." not in first) and not any(name[0] == "." for name in rest)


_LOGS = Expected(
    admits=lambda name, length: length <= {"log": LOG_BYTES, "status": STATUS_BYTES}.get(name, -1),
    max_members=2,
    max_bytes=LOG_BYTES + STATUS_BYTES,
)


def _folder_of(run: Path, host: SshHost) -> Path:
    return run / LOGS / host.name.replace("/", "_")
