"""A lock between processes of a machine: a file that names the process that holds the lock.

The lock is the kernel's (`flock`), which frees it when the holder ends for any reason. The content of the file is only
for messages.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gradstream.errors import DataError

POLL_S = 0.05


@contextmanager
def machine_lock(
    path: Path, *, doing: str, wait_s: float, on_wait: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Holds the lock file, and first waits until no other process of this machine holds it.

    Args:
        path: the lock file, in a folder that exists. It is not removed. Where it is new, other users cannot open it.
        doing: work of the holder, for the messages of waiting processes: "downloading caltech101".
        wait_s: longest time to wait, in seconds.
        on_wait: called once with a message if the process has to wait.

    Raises:
        DataError: another process has held the lock for `wait_s`; the message names it. Nothing was done.
        OSError: the file cannot be written.
    """
    give_up = time.monotonic() + wait_s
    with open(path, "a+b", buffering=0, opener=_open_for_owner) as file:
        reported = False
        while not _taken(file.fileno()):
            holder = _holder(path)
            if time.monotonic() >= give_up:
                raise DataError(
                    f"{holder} has held the lock {path} for {wait_s:g} s; wait until that process is done, or end "
                    "it and start again: its unfinished work is then continued or discarded"
                )
            if on_wait is not None and not reported:
                on_wait(f"waiting for {holder}")
                reported = True
            time.sleep(POLL_S)
        file.truncate(0)
        try:
            file.write(json.dumps({"pid": os.getpid(), "doing": doing}).encode())
        except OSError:
            pass  # the disk is full: the lock holds, and messages name "another process"
        try:
            yield
        finally:
            file.truncate(0)


def _open_for_owner(path: str, flags: int) -> int:
    """Opens a lock file, and makes it readable for its owner alone: whoever can open it can hold the lock."""
    return os.open(path, flags, 0o600)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> str:
    """The process that holds the lock, in words; it may not have written its name yet."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} ({holder['doing']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
