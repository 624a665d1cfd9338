"""A disk that fails for as long as a test says so."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from gradstream.runtime.base import Buffer
from gradstream.runtime.storage import MemoryStorage


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
