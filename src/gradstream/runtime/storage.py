"""Storage on disk and in memory."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["DiskStorage", "MemoryStorage"]


class DiskStorage:
    """Files below a directory.

    Args:
        root: the run directory; parents of a file are made when it is written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, data: bytes) -> None:
        """Atomic and durable: after a crash the file has its old or its new content."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def append(self, path: str, data: bytes) -> None:
        """One write at the end of the file: lines of several writers do not mix."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "ab", buffering=0) as file:
            file.write(data)

    def read(self, path: str) -> bytes:
        """The whole file."""
        return (self.root / path).read_bytes()


class MemoryStorage:
    """Files in a dictionary, for simulated nodes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def write(self, path: str, data: bytes) -> None:
        """Replaces the file."""
        self.files[path] = data

    def append(self, path: str, data: bytes) -> None:
        """Adds to the file."""
        self.files[path] = self.files.get(path, b"") + data

    def read(self, path: str) -> bytes:
        """The file's content. Raises FileNotFoundError."""
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]
