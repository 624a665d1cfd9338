"""One at a time on this machine: a lock file that says who holds it.

The lock is the kernel's (`flock`): it is free the moment its holder dies, however it dies, so that a
lock left behind stops nobody. What is written in the file is only for messages.
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

__all__ = ["machine_lock"]

POLL_S = 0.05


@contextmanager
def machine_lock(
    path: Path, *, doing: str, wait_s: float, on_wait: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Holds the lock file; waits while another process of this machine does.

    Args:
        path: the lock file, in a folder that exists. It stays behind, empty of meaning.
        doing: what the holder does, for who has to wait: "downloading caltech101".
        wait_s: how long to wait for another holder.
        on_wait: told once who is waited for, if there is somebody.

    Raises:
        DataError: somebody else has held it for `wait_s`; says who and what for. Nothing was done.
        OSError: the file cannot be written.
    """
    give_up = time.monotonic() + wait_s
    with open(path, "a+b", buffering=0) as file:
        told = False
        while not _taken(file.fileno()):
            holder = _holder(path)
            if time.monotonic() >= give_up:
                raise DataError(
                    f"{holder} has held {path} for {wait_s:g} s; wait until it is done, or end it and "
                    "start again: what it has left half done is taken up or thrown away"
                )
            if on_wait is not None and not told:
                on_wait(f"waiting for {holder}")
                told = True
            time.sleep(POLL_S)
        file.truncate(0)
        try:
            file.write(json.dumps({"pid": os.getpid(), "doing": doing}).encode())
        except OSError:
            pass  # the disk is full: the lock holds, and who waits for it is told of "another process"
        try:
            yield
        finally:
            file.truncate(0)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> str:
    """Who holds the lock, in words; between taking it and saying so, nobody knows."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return f"process {said['pid']} ({said['doing']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
