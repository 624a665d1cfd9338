"""Disks that fail: the power goes between any two operations, or there is no space left.

`CrashingStorage` keeps two states: the one that processes see, and the one that would survive. A name is durable once
its folder was synced; a change that was not synced may be there after the crash, or not: tests look at both.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from gradstream.runtime.base import Buffer
from gradstream.runtime.storage import MemoryStorage

__all__ = ["CrashingStorage", "FailingStorage", "FullStorage", "PowerCutError"]


class PowerCutError(Exception):
    """The power went."""


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


class CrashingStorage(MemoryStorage):
    """Goes down in its `crash_at`-th operation that changes anything (from 0), in the middle of it.

    Args:
        files: durable content of the disk.
        crash_at: None never goes down.
    """

    def __init__(self, files: dict[str, bytes] | None = None, crash_at: int | None = None) -> None:
        super().__init__()
        self.files = dict(files or {})
        self.num_operations = 0
        self._disk = dict(self.files)
        self._renames: list[tuple[str, str]] = []
        self._left = crash_at

    def survivors(self) -> list[dict[str, bytes]]:
        """The possible contents after the crash: only the synced ones, or everything."""
        return [dict(self._disk), dict(self.files)]

    def write(self, path: str, data: bytes) -> None:
        """Atomic and durable: a crash leaves the old content."""
        self._operate()
        super().write(path, data)
        self._disk[path] = data

    def patch(self, path: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
        """A crash leaves the first half of the pieces."""
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
        """Durable once the parent was synced."""
        self._operate()
        super().rename(old, new)
        self._renames.append((old, new))

    def remove(self, path: str) -> None:
        """After a crash the file may be there or not."""
        self._operate()
        super().remove(path)

    def _operate(self) -> None:
        if self._left is not None:
            if self._left == 0:
                raise PowerCutError
            self._left -= 1
        self.num_operations += 1


class FailingStorage(MemoryStorage):
    """A disk that fails while `error` is set: ENOSPC, EDQUOT, EIO, EROFS.

    Attributes:
        error: errno that every operation raises that needs room; 0 for none.
        fits: number of records of the first failing append that are still written.
        num_failed: how often it has failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error = 0
        self.fits = 0
        self.num_failed = 0

    def write(self, path: str, data: bytes) -> None:
        """As on a disk, the old file stands."""
        self._fail(path)
        super().write(path, data)

    def append(self, path: str, *records: bytes) -> int:
        """Some records may fit."""
        if self.error and self.fits:
            fits, self.fits = min(self.fits, len(records)), 0
            return super().append(path, *records[:fits])
        self._fail(path)
        return super().append(path, *records)

    def patch(self, path: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
        """Some of the pieces are written."""
        if self.error and self.error != errno.EROFS:
            super().patch(path, list(pieces)[:1])
        self._fail(path)
        super().patch(path, pieces)

    def rename(self, old: str, new: str) -> None:
        """Needs room in the folder."""
        self._fail(new)
        super().rename(old, new)

    def remove(self, path: str) -> None:
        """Needs no room."""
        if self.error in (errno.EIO, errno.EROFS):
            self._fail(path)
        super().remove(path)

    def _fail(self, path: str) -> None:
        if self.error:
            self.num_failed += 1
            raise OSError(self.error, os.strerror(self.error), path)


class FullStorage(MemoryStorage):
    """Has no space left for checkpoints from the `full_from`-th write to them on (from 0)."""

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
