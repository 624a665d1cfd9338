"""The lock of a run's launcher: the kernel says whether the run has one, and which process it is.

It is a POSIX lock of the file `.launcher`, because the kernel frees such a lock with its process, does not pass it on
to children, and names its owner (F_GETLK). So a process that is told to stop is the launcher, whatever the file says
and however often process ids are reused. The content of the file is for processes that follow the run.
Linux on 64 bits: `_LOCK` is its `struct flock`.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradstream.errors import ConfigError, DataError
from gradstream.run.files import read_record
from gradstream.untrusted import MismatchError, check_record

FILE = ".launcher"

ELSEWHERE = -1
"""Stands for the id of a process that is not visible from this machine or container."""

_LOCK = "hhqqi0q"
_held: set[Path] = set()  # by this process, whose own locks the kernel does not show


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRecord:
    """What a launcher writes about itself.

    Args:
        host: name of its machine.
        events_from: size of `events.jsonl` when this part of the run began, in bytes.
    """

    host: str
    events_from: int = 0

    @classmethod
    def here(cls, *, events_from: int) -> LauncherRecord:
        """The record of a launcher in this process."""
        return cls(host=socket.gethostname(), events_from=events_from)

    @classmethod
    def read(cls, run_dir: Path) -> LauncherRecord | None:
        """The record of the latest launcher; None if there is none, or if the disk was too full for it.

        Raises:
            ConfigError: the file is damaged.
        """
        path = run_dir / FILE
        if run_dir.resolve() in _held:
            raise ConfigError(f"{run_dir} is a run of this process itself: wait until `train` returns")
        try:
            if not path.stat().st_size:
                return None
            record = read_record(path)
            check_record(cls, record)
            if record["events_from"] < 0:
                raise MismatchError(f"events_from is {record['events_from']}, expected 0 or more")
        except FileNotFoundError:
            return None
        except MismatchError as error:
            raise ConfigError(
                f"the launcher's record {path} is damaged: {error}. It says which process on which machine runs this "
                "run. If no process of the run is alive, delete it and call this command again: nothing is lost"
            ) from None
        return cls(**record)


@contextmanager
def launcher_lock(run_dir: Path, record: LauncherRecord) -> Iterator[None]:
    """Makes this process the launcher of a run, as seen by other processes.

    Raises:
        DataError: another process is. Nothing was done.
        OSError: the file cannot be written.
    """
    run_dir = run_dir.resolve()
    if run_dir in _held:
        raise DataError(
            f"this process runs {run_dir} already; name another run_dir, or wait until that run ends"
        )
    with open(os.open(run_dir / FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb", 0) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{_named(_owner(file.fileno()))} runs {run_dir} already; {_REMEDY}") from None
        _held.add(run_dir)
        try:
            file.truncate(0)
            file.write(json.dumps(dataclasses.asdict(record)).encode())
        except OSError:
            pass  # the disk is full: the lock holds
        try:
            yield
        finally:
            _held.discard(run_dir)


_REMEDY = "`gradstream attach` shows its progress, `gradstream stop` ends it"


def holder_of(run_dir: Path) -> int | None:
    """Id of the process that is the run's launcher, ELSEWHERE if it cannot be seen from here; None if there is none.

    Raises:
        ConfigError: the run belongs to another user.
    """
    if run_dir.resolve() in _held:
        return os.getpid()  # opening and closing the file would free the lock
    try:
        file = os.open(run_dir / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{run_dir / FILE} cannot be read: {error.strerror}; is this a run of yours?"
        ) from None
    try:
        return _owner(file)
    finally:
        os.close(file)


def signal_launcher(run_dir: Path, number: int) -> bool:
    """Sends a signal to the run's launcher; False if it has none by now.

    The process is looked up, held by a descriptor, and looked up again: so it is the launcher, or was a moment ago,
    and never another process with the same id.

    Raises:
        ConfigError: the launcher is on another machine, or in another container.
    """
    pid = holder_of(run_dir)
    if pid is None:
        return False
    if pid == ELSEWHERE:
        raise ConfigError(f"{_named(pid)} runs {run_dir}: stop it there")
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if holder_of(run_dir) != pid:
            return False
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(process)
    return True


def _owner(file: int) -> int | None:
    asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_LOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    if kind == fcntl.F_UNLCK:
        return None
    return int(pid) if pid > 0 else ELSEWHERE


def _named(pid: int | None) -> str:
    return f"process {pid}" if pid is not None and pid > 0 else "a process of another machine or container"
