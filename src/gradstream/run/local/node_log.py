"""Writes the output of a node to its log file; a full disk loses some of it, and does not end the node."""

from __future__ import annotations

import errno
import io
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from gradstream.untrusted import escaped

if TYPE_CHECKING:
    from typing_extensions import Buffer

WARNING_BYTES = 2048
"""Longest warning that the launcher shows."""


def show_warnings(node: str, say: Callable[..., None]) -> None:
    """Has the launcher show the warnings of this process, each distinct one once; the log gets all of them.

    Args:
        node: name of the node.
        say: sends a message to the launcher.
    """
    logged, shown = warnings.showwarning, set()

    def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
        logged(message, category, *where, **options)
        text = escaped(str(message), WARNING_BYTES, newlines=True)
        if (category, text) not in shown:
            shown.add((category, text))
            say(output=f"{node}: {category.__name__}: {text}\n")

    warnings.showwarning = show


class _Lossy(io.RawIOBase):
    """Writes to a file descriptor, and counts the bytes that a full disk loses; later it writes their number."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lost_bytes = 0
        self._error = ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return False

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        try:
            if self._lost_bytes:
                text = f"\n[{self._lost_bytes} bytes of this log are lost: {self._error}]\n"
                os.write(self._descriptor, text.encode())
                self._lost_bytes = 0
            return os.write(self._descriptor, view)
        except OSError as error:
            self._lost_bytes += len(view)
            self._error = errno.errorcode.get(error.errno or 0, str(error))
            return len(view)


def log_stream(descriptor: int, *, by_line: bool) -> TextIO:
    """A text stream to a log file, for `sys.stdout` and `sys.stderr`: it raises no error of the disk.

    Args:
        descriptor: file descriptor; it stays open.
        by_line: whether each line is written at once, as by `sys.stderr`.
    """
    buffer = io.BufferedWriter(_Lossy(descriptor))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=by_line)
