"""Storage on disk and in memory."""

from __future__ import annotations

import errno
import json
import os
import shutil
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from gradstream.runtime.base import Buffer, Storage
from gradstream.telemetry.events import DiskEvent, encode
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


# ---- event log ---------------------------------------------------------------------------
# `EventLog`: the events of a run as a file. A full disk delays lines, and never tears a line or ends the run.
#
#     append ──▶ waiting ──▶ file            while the disk takes them, at once
#                   │
#                   └─ more than `room_bytes` wait: lost, and counted
#
# Frequent events (steps, bytes, process metrics) are lost first: the last quarter of the room is for events that
# describe the state of the run. Once all waiting lines are written, one event says how many were lost, and
# between which times.

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""Errors of a disk that is full, over its quota, broken or read-only. They may pass."""

RETRY_S = 0.5
ROOM_BYTES = 4 << 20

_FREQUENT = tuple(
    b'{"event":"%s"' % kind
    for kind in (
        b"step",
        b"log",
        b"exchange",
        b"link",
        b"transfer",
        b"applied",
        b"round",
        b"cpu",
        b"late",
        b"memory",
    )
)
_DISK = b'{"event":"%s"' % DiskEvent.name.encode()


def disk_error(error: OSError) -> str:
    """A system error as text: "ENOSPC: No space left on device"."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return f"{name}: {error.strerror or error}"


_REMEDIES = {
    "make room": {errno.ENOSPC, errno.EDQUOT},
    "get the permission to write there (`ls -ld` shows whose it is)": {errno.EACCES, errno.EPERM},
    "have it mounted for writing": {errno.EROFS},
    "take a file system with locks (NFS has none without its lock service)": {
        errno.ENOLCK,
        errno.ENOTSUP,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
        errno.EINVAL,
    },
    "look for a broken disk or server (`dmesg`)": {errno.EIO, errno.ESTALE, errno.EUCLEAN},
    "allow more open files (ulimit -n)": {errno.EMFILE, errno.ENFILE},
    "make the folder again, which is not there": {errno.ENOENT, errno.ENOTDIR},
    "allow larger files (ulimit -f)": {errno.EFBIG},
}


def disk_remedy(error: OSError) -> str:
    """What a user can do about a system error of a folder: making room helps only if the disk is full."""
    remedies = (text for text, numbers in _REMEDIES.items() if error.errno in numbers)
    return next(remedies, "mend what the system says")


@dataclass(slots=True)
class _Outage:
    """A time in which nothing can be written: its cause, and how many events were late or lost."""

    error: str
    from_s: float
    to_s: float
    late_events: int = 0
    lost_events: int = 0
    lost_bytes: int = 0


class EventLog:
    """Adds lines to a file of events. No method raises because of the disk.

    Args:
        node: name of the node in the event that reports losses.
        now: returns nanoseconds, for the time between two attempts.
        tell: shows a sentence to the user who started the run, without using the disk.
        room_bytes: the most bytes of events that may wait.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        *,
        node: str,
        now: Callable[[], int],
        tell: Callable[[str], None],
        room_bytes: int = ROOM_BYTES,
    ) -> None:
        self._storage = storage
        self._path = path
        self._node = node
        self._now = now
        self._tell = tell
        self._room_bytes = room_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._outage: _Outage | None = None
        self._retry_ns = 0

    @property
    def waiting(self) -> list[bytes]:
        """Lines that are not in the file yet."""
        return list(self._waiting)

    def append(self, lines: bytes) -> None:
        """Adds whole lines: at once, or once the disk takes them again."""
        for line in lines.splitlines(keepends=True):
            self._take(line)
        if self._outage is None or self._now() >= self._retry_ns:
            self.flush()

    def flush(self) -> bool:
        """Tries to write the waiting lines; returns whether none waits any more."""
        try:
            self._write()
            if self._outage is not None:
                self._conclude(self._outage)
                self._write()
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _take(self, line: bytes) -> None:
        outage = self._outage
        if outage is not None:
            outage.to_s = max(outage.to_s, _time_s(line))
            if line.startswith(_DISK):
                self._tell(json.loads(line)["message"])
            room_bytes = self._room_bytes * 3 // 4 if line.startswith(_FREQUENT) else self._room_bytes
            if self._waiting_bytes + len(line) > room_bytes:
                outage.lost_events += 1
                outage.lost_bytes += len(line)
                return
            outage.late_events += 1
        self._waiting.append(line)
        self._waiting_bytes += len(line)

    def _write(self) -> None:
        while self._waiting:
            for _ in range(self._storage.append(self._path, *self._waiting)):
                self._waiting_bytes -= len(self._waiting.popleft())

    def _fail(self, error: OSError) -> None:
        self._retry_ns = self._now() + round(RETRY_S * 1e9)
        if self._outage is not None:
            return
        first_s, last_s = _time_s(self._waiting[0]), _time_s(self._waiting[-1])
        self._outage = _Outage(disk_error(error), first_s, last_s, late_events=len(self._waiting))
        self._tell(
            f"the disk of the run directory does not take {self._path}: {self._outage.error}; the run goes "
            f"on, and its events wait in memory; {disk_remedy(error)}"
        )

    def _conclude(self, outage: _Outage) -> None:
        """Adds an event that reports the losses as the next line of the file."""
        self._outage = None
        event = DiskEvent(
            what="events",
            state="over",
            error=outage.error,
            message=f"{outage.late_events} events were written late and {outage.lost_events} "
            f"({outage.lost_bytes} bytes) are lost: {outage.error}",
            from_s=outage.from_s,
            to_s=outage.to_s,
            late_events=outage.late_events,
            lost_events=outage.lost_events,
            lost_bytes=outage.lost_bytes,
        )
        self._take(encode(event, node=self._node, time_s=outage.to_s))

    def why_short(self) -> str:
        """A sentence about the events that the file lacks now; "" if it lacks none."""
        outage = self._outage
        if outage is None:
            return ""
        count = outage.lost_events + len(self._waiting)
        size_bytes = outage.lost_bytes + self._waiting_bytes
        lacks = f"{self._path} lacks {count} events ({size_bytes} bytes)"
        return f"{lacks} from {outage.from_s:.1f} s on: {outage.error}"


def _time_s(line: bytes) -> float:
    """Time of an event in seconds; 0 where the line has none."""
    try:
        return float(json.loads(line)["time_s"])
    except (ValueError, KeyError, TypeError):
        return 0.0
