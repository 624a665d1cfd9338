"""The door of a detached run: a named pipe in its directory, through which another launcher reaches the forkserver.

    launcher  ── orders ──▶ .door ──▶ forkserver         the first launcher, and each later one
    launcher  ◀── replies ─ pipe ──── forkserver         anonymous for the first; a later one makes .replies-<pid>

Only its user can open it. Whoever opens it for writing learns from the kernel whether a forkserver reads it, so a
pipe that a killed forkserver has left behind tells nothing wrong. Nothing listens on a socket.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from gradstream.errors import ConfigError

DOOR = ".door"


def make_pipe(path: Path) -> None:
    """Makes a named pipe for this user alone; one that is there is left over, and removed.

    Raises:
        ConfigError: the file system has no named pipes.
    """
    path.unlink(missing_ok=True)
    try:
        os.mkfifo(path, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{path}: a named pipe could not be made here ({error.strerror}), and a detached run needs it; put the run "
            "directory on another file system with run_dir=, or --run-dir, or leave out --detach"
        ) from error


def open_reader(path: Path) -> int:
    """Opens the end for reading, without waiting for a writer. Raises as `open_writer`."""
    return _opened(path, os.O_RDONLY)


def open_writer(path: Path) -> int:
    """Opens the end for writing.

    Raises:
        OSError: there is no pipe (ENOENT), or nobody reads it (ENXIO).
        ConfigError: this is no pipe of this user.
    """
    return _opened(path, os.O_WRONLY)


def has_reader(path: Path) -> bool:
    """Whether a forkserver reads the pipe. Raises ConfigError as `open_writer`."""
    try:
        os.close(open_writer(path))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.EACCES):
            return False
        raise
    return True


def _opened(path: Path, way: int) -> int:
    try:
        pipe = os.open(path, way | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigError(f"{path} is a link; {_EXPECTED}") from None
    found = os.fstat(pipe)
    if stat.S_ISFIFO(found.st_mode) and found.st_uid == os.geteuid():
        os.set_blocking(pipe, True)
        return pipe
    os.close(pipe)
    raise ConfigError(f"{path} is something else; {_EXPECTED}")


_EXPECTED = "expected a named pipe of this user, which gradstream has made: end the run's processes by hand"
