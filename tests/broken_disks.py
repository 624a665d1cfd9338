"""Disks that fail: the power fails between any two operations, or no space is left.

`CrashingStorage` keeps two states: the one that processes see, and the one that survives a crash. A name is durable
once its folder was synced. A change that was not synced may survive or not: tests look at both.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from gradstream.runtime.base import Buffer
from gradstream.runtime.storage import MemoryStorage


class PowerCutError(Exception):
    """The power has failed."""


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


class CrashingStorage(MemoryStorage):
    """A disk whose power fails in the middle of an operation.

    Args:
        files: durable content of the disk.
        crash_at: number of the operation that crashes, counting those that change anything from 0; None never
            crashes.
    """

    def __init__(self, files: dict[str, bytes] | None = None, crash_at: int | None = None) -> None:
        super().__init__()
        self.files = dict(files or {})
        self.num_operations = 0
        self._disk = dict(self.files)
        self._renames: list[tuple[str, str]] = []
        self._left = crash_at

    def survivors(self) -> list[dict[str, bytes]]:
        """The possible contents after the crash: without the changes that were not synced, or with them."""
        return [dict(self._disk), dict(self.files)]

    def write(self, path: str, data: bytes) -> None:
        """Writes atomically and durably: a crash leaves the old content."""
        self._operate()
        super().write(path, data)
        self._disk[path] = data

    def patch(self, path: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
        """Writes the pieces; a crash leaves the first half of them."""
        pieces = list(pieces)
        if self._left == 0:
            super().patch(path, pieces[: len(pieces) // 2])
        self._operate()
        super().patch(path, pieces)
        if path in self._disk:
            self._disk[path] = self.files[path]

    def sync(self, folder: str) -> None:
        """Makes the names in the folder durable."""
        self._operate()
        for old, new in [pair for pair in self._renames if _parent(pair[1]) == folder]:
            self._renames.remove((old, new))
            for path in [path for path in self._disk if path == old or path.startswith(f"{old}/")]:
                self._disk[new + path[len(old) :]] = self._disk.pop(path)
        for path in {*self._disk, *self.files}:
            if _parent(path) == folder:
                if path in self.files:
                    self._disk[path] = self.files[path]
                else:
                    del self._disk[path]

    def rename(self, old: str, new: str) -> None:
        """Renames; durable once the parent folder was synced."""
        self._operate()
        super().rename(old, new)
        self._renames.append((old, new))

    def remove(self, path: str) -> None:
        """Removes a file; after a crash it may be there or not."""
        self._operate()
        super().remove(path)

    def _operate(self) -> None:
        if self._left is not None:
            if self._left == 0:
                raise PowerCutError
            self._left -= 1
        self.num_operations += 1


class FullStorage(MemoryStorage):
    """A disk that is full for checkpoints from the `full_from`-th write to them on, counted from 0."""

    def __init__(self, full_from: int) -> None:
        super().__init__()
        self._left = full_from

    def patch(self, path: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
        """Raises OSError once it is full, with some of the pieces written."""
        if self._left <= 0:
            super().patch(path, list(pieces)[:1])
            raise OSError(errno.ENOSPC, "No space left on device", path)
        self._left -= 1
        super().patch(path, pieces)
