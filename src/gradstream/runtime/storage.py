"""Storage on disk and in memory."""

from __future__ import annotations

import os
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from gradstream.runtime.base import Buffer
from gradstream.untrusted import open_regular, read_regular

REMOVE_TRIES = 8


def private_folder(path: Path) -> None:
    """Makes a folder that only its owner may enter, with its parents; one that is there stays as it is."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)


class DiskStorage:
    """Files below a directory.

    Args:
        root: the run directory, which only its owner may enter if it is made here. Folders in it are made when a file
            in them is written.
        durable: whether written files survive a power cut; False is faster, for a trial whose files are removed.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self._durable = durable
        self._torn: dict[str, tuple[int, int]] = {}  # by file: end and begin of a torn record

    def write(self, path: str, data: bytes) -> None:
        """Replaces the file atomically: after a crash it has its old or its new content."""
        target = self.root / path
        self.mkdir(os.path.dirname(path))
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                self._sync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._sync_folder(target.parent)

    def append(self, path: str, *records: bytes) -> int:
        """See `Storage.append`. Records of several writers do not mix."""
        target = self.root / path
        self.mkdir(os.path.dirname(path))
        data = memoryview(b"".join(records))
        with open(target, "ab", buffering=0) as file:
            self._cut_torn(file.fileno(), path)
            written = 0
            try:
                while written < len(data):  # a disk that becomes full takes the first bytes, then none
                    written += file.write(data[written:]) or 0
            except OSError:
                count, whole = _whole_records(records, written)
                if whole < written:
                    end = file.tell()
                    self._torn[path] = (end, end - (written - whole))
                    self._cut_torn(file.fileno(), path)
                if not count:
                    raise
                return count
        return len(records)

    def _cut_torn(self, file: int, path: str) -> None:
        """Removes a torn record from a file's end, unless another writer has added bytes since."""
        if path in self._torn:
            end, whole = self._torn[path]
            try:
                if os.fstat(file).st_size == end:
                    os.ftruncate(file, whole)
            except OSError:
                return  # tried again before the next record
            del self._torn[path]

    def read(self, path: str) -> bytes:
        """The whole file."""
        return read_regular(self.root / path)

    def patch(self, path: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
        """See `Storage.patch`."""
        file = os.open(self.root / path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            for offset, piece in pieces:
                left = memoryview(piece).cast("B")
                while left:
                    written = os.pwrite(file, left, offset)
                    left, offset = left[written:], offset + written
            self._sync(file)
        finally:
            os.close(file)

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        """See `Storage.read_at`."""
        with open_regular(self.root / path) as file:
            parts = []
            while size > 0 and (part := os.pread(file.fileno(), size, offset)):
                parts.append(part)
                size, offset = size - len(part), offset + len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return (self.root / path).stat().st_size

    def names(self, folder: str) -> list[str]:
        """See `Storage.names`."""
        try:
            return sorted(os.listdir(self.root / folder))
        except FileNotFoundError:
            return []

    def mkdir(self, folder: str) -> None:
        """Makes a folder, with its parents."""
        private_folder(self.root)
        (self.root / folder).mkdir(parents=True, exist_ok=True)

    def sync(self, folder: str) -> None:
        """Makes the names in a folder durable."""
        self._sync_folder(self.root / folder)

    def rename(self, old: str, new: str) -> None:
        """See `Storage.rename`."""
        os.rename(self.root / old, self.root / new)

    def remove(self, path: str) -> None:
        """See `Storage.remove`."""
        target = self.root / path
        if not target.is_dir() or target.is_symlink():
            target.unlink(missing_ok=True)
            return
        for _ in range(REMOVE_TRIES):  # another node may be writing into it, and make a file meanwhile
            shutil.rmtree(target, ignore_errors=True)
            if not target.exists():
                return

    def _sync_folder(self, path: Path) -> None:
        folder = os.open(path, os.O_RDONLY)
        try:
            self._sync(folder)
        finally:
            os.close(folder)

    def _sync(self, file: int) -> None:
        if self._durable:
            os.fsync(file)


def _whole_records(records: Sequence[bytes], size_bytes: int) -> tuple[int, int]:
    """Number of records that are whole within their first `size_bytes`, and the end of the last of these."""
    ends = list(accumulate(map(len, records)))
    count = bisect_right(ends, size_bytes)
    return count, ends[count - 1] if count else 0


class MemoryStorage:
    """Files in a dictionary, for simulated nodes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def write(self, path: str, data: bytes) -> None:
        """Replaces the file."""
        self.files[path] = data

    def append(self, path: str, *records: bytes) -> int:
        """Adds to the file."""
        self.files[path] = self.files.get(path, b"") + b"".join(records)
        return len(records)

    def read(self, path: str) -> bytes:
        """The file's content. Raises FileNotFoundError."""
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def patch(self, path: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
        """See `Storage.patch`."""
        data = bytearray(self.files.get(path, b""))
        for offset, piece in pieces:
            part = bytes(piece)
            data.extend(bytes(max(0, offset + len(part) - len(data))))
            data[offset : offset + len(part)] = part
        self.files[path] = bytes(data)

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        """See `Storage.read_at`."""
        return self.read(path)[offset : offset + size]

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return len(self.read(path))

    def names(self, folder: str) -> list[str]:
        """See `Storage.names`."""
        inside = [path[len(folder) + 1 :] for path in self.files if path.startswith(f"{folder}/")]
        return sorted({name.partition("/")[0] for name in inside})

    def mkdir(self, folder: str) -> None:
        """Does nothing: there are no folders in memory."""

    def sync(self, folder: str) -> None:
        """Does nothing: memory does not survive a crash."""

    def rename(self, old: str, new: str) -> None:
        """See `Storage.rename`."""
        for path in [path for path in self.files if path == old or path.startswith(f"{old}/")]:
            self.files[new + path[len(old) :]] = self.files.pop(path)

    def remove(self, path: str) -> None:
        """See `Storage.remove`."""
        for file in [file for file in self.files if file == path or file.startswith(f"{path}/")]:
            del self.files[file]
