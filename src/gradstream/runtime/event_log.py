"""`EventLog`: the events of a run as a file. A full disk delays lines, and never tears a line or ends the run.

    append ──▶ waiting ──▶ file            while the disk takes them, at once
                  │
                  └─ more than `room_bytes` wait: lost, and counted

Frequent events (steps, bytes, process metrics) are lost first: the last quarter of the room is for events that
describe the state of the run. Once all waiting lines are written, one event says how many were lost, and
between which times.
"""

from __future__ import annotations

import errno
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gradstream.runtime.base import Storage
from gradstream.telemetry.events import DiskEvent, encode

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
