"""Reads small files where somebody else may have put anything else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gradstream.errors import ConfigError


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of a file. Does not wait, whatever lies there.

    Raises:
        FileNotFoundError: there is nothing.
        ConfigError: it is a link, a pipe or no file at all, is larger, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path} is no regular file; remove it")
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read as a regular file, which it has to be: {error.strerror}"
        ) from None
    if len(data) > max_bytes:
        raise ConfigError(f"{path} has more than {max_bytes:,} bytes")
    return data
