"""Disks that fail: the power fails between any two operations, or no space is left.

`CrashingStorage` keeps two states: the one that processes see, and the one that survives a crash. A name is durable
once its folder was synced. A change that was not synced may survive or not: tests look at both.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from gradstream.runtime.base import Buffer
from gradstream.runtime.storage import MemoryStorage

__all__ = ["CrashingStorage", "FailingStorage", "FullStorage", "PowerCutError"]


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


class FailingStorage(MemoryStorage):
    """A disk that fails while `error` is set: ENOSPC, EDQUOT, EIO, EROFS.

    Attributes:
        error: errno of the OSError that operations raise; 0 for none. Only EIO and EROFS also stop `remove`.
        fits: number of records that the first failing append still writes.
        num_failed: number of operations that have failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error = 0
        self.fits = 0
        self.num_failed = 0

    def write(self, path: str, data: bytes) -> None:
        """Writes a file; where it fails, the old content remains, as on a disk."""
        self._fail(path)
        super().write(path, data)

    def append(self, path: str, *records: bytes) -> int:
        """Appends records; where it fails, some of them may still fit."""
        if self.error and self.fits:
            fits, self.fits = min(self.fits, len(records)), 0
            return super().append(path, *records[:fits])
        self._fail(path)
        return super().append(path, *records)

    def patch(self, path: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
        """Writes the pieces; where it fails, the first of them is written."""
        if self.error and self.error != errno.EROFS:
            super().patch(path, list(pieces)[:1])
        self._fail(path)
        super().patch(path, pieces)

    def rename(self, old: str, new: str) -> None:
        """Renames, which needs room in the folder."""
        self._fail(new)
        super().rename(old, new)

    def remove(self, path: str) -> None:
        """Removes a file, which needs no room."""
        if self.error in (errno.EIO, errno.EROFS):
            self._fail(path)
        super().remove(path)

    def _fail(self, path: str) -> None:
        if self.error:
            self.num_failed += 1
            raise OSError(self.error, os.strerror(self.error), path)


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
