"""Reads files where somebody else may have put anything else: none of these functions waits, whatever lies there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

from gradstream.errors import ConfigError

FILE_BYTES = 1 << 28
"""The longest file that is read whole."""


def open_regular(path: str | os.PathLike[str], *, links: bool = True) -> BinaryIO:
    """Opens a file for reading, and not what only looks like one: a pipe, whose reader waits for a writer, or a device.

    Args:
        path: the file.
        links: whether it may be a link to one.

    Raises:
        OSError: it is no regular file, or cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return cast("BinaryIO", open(descriptor, "rb", buffering=0))


def read_regular(path: str | os.PathLike[str], max_bytes: int = FILE_BYTES, *, links: bool = True) -> bytes:
    """The content of a regular file of at most so many bytes. Raises OSError for any other."""
    with open_regular(path, links=links) as file:
        if (size_bytes := os.fstat(file.fileno()).st_size) > max_bytes:
            text = f"it has {size_bytes:,} bytes, expected at most {max_bytes:,}"
            raise OSError(errno.EFBIG, text, os.fspath(path))
        return file.read()


def read_settings(path: Path, max_bytes: int) -> bytes:
    """The content of a file of gradstream's own, which is no link.

    Raises:
        FileNotFoundError: there is nothing.
        ConfigError: it is a link, a pipe or no file at all, is larger, or cannot be read.
    """
    try:
        return read_regular(path, max_bytes, links=False)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read as a regular file, which it has to be: {error.strerror}"
        ) from None
