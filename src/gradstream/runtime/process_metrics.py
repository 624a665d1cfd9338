"""Metrics of this process: how late its event loop is, and how much memory it uses.

Measuring takes time on cores that backprop needs, so each measures only as often as its class says.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path


class LoopLag:
    """Measures how late timers fire, with ten samples a second: each sample wakes the process."""

    PERIOD_S = 0.1

    def __init__(self) -> None:
        self._late_s: list[float] = []

    async def watch(self) -> None:
        """Measures until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.PERIOD_S
            await asyncio.sleep(self.PERIOD_S)
            self._late_s.append(loop.time() - due)

    def take(self) -> tuple[float, float]:
        """(99th percentile, maximum) of the lateness in seconds since the previous call."""
        late, self._late_s = sorted(self._late_s), []
        if not late:
            return 0.0, 0.0
        return late[int(0.99 * (len(late) - 1))], late[-1]


class OwnMemory:
    """Measures `own_bytes` of this process, and its maximum.

    With shared memory the system needs long for the answer: it visits all pages, 20 ms for a gigabyte. So
    this measures again when the resident memory, which is known at once, has changed by `CHANGE`, and
    otherwise for at most `SHARE_OF_TIME` of the time.

    Args:
        shared: see `own_bytes`.
        read: returns the bytes; takes `shared`.
        clock: returns seconds.
    """

    SHARE_OF_TIME = 1e-3
    CHANGE = 0.02

    def __init__(
        self,
        *,
        shared: bool,
        read: Callable[[bool], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peak_bytes = 0
        self._shared = shared
        self._read = read or (lambda shared: own_bytes(shared=shared))
        self._clock = clock
        self._due_s = 0.0
        self._resident_bytes = 0  # at the last measurement
        self._now_bytes = 0

    def take(self) -> int:
        """Bytes now, or at the last measurement."""
        resident_bytes = self._read(False)
        if not self._shared:
            self._now_bytes = resident_bytes
        elif self._is_due(resident_bytes):
            begun_s = self._clock()
            self._now_bytes, self._resident_bytes = self._read(True), resident_bytes
            ended_s = self._clock()
            self._due_s = ended_s + (ended_s - begun_s) / self.SHARE_OF_TIME
        self.peak_bytes = max(self.peak_bytes, self._now_bytes)
        return self._now_bytes

    def _is_due(self, resident_bytes: int) -> bool:
        changed_bytes = abs(resident_bytes - self._resident_bytes)
        return changed_bytes > self.CHANGE * resident_bytes or self._clock() >= self._due_s


def load_of_machine() -> float | None:
    """Mean number of threads on the machine that ran or waited for a core, over a minute; None if unknown."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def queued_s(thread: int | None) -> float | None:
    """Seconds in which a thread of this process was ready to run and had no core.

    Args:
        thread: native id of the thread (`threading.get_native_id`); None for none.

    Returns:
        None if the system does not count it: only Linux does.
    """
    if thread is None:
        return None
    try:
        _, waited_ns, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="utf-8").split()
        return int(waited_ns) / 1e9
    except (OSError, ValueError):
        return None


def own_bytes(*, shared: bool = False) -> int:
    """Bytes of resident memory of this process that belong to no file; 0 where the system does not tell.

    Args:
        shared: the process shares memory with others: a page that n processes have mapped counts as 1/n
            (proportional set size), so that the sum over all processes is their common use.
    """
    names = ("Pss_Anon:", "Pss_Shmem:") if shared else ("RssAnon:", "RssShmem:")
    try:
        lines = (
            Path("/proc/self/smaps_rollup" if shared else "/proc/self/status")
            .read_text(encoding="utf-8")
            .splitlines()
        )
    except OSError:
        return own_bytes() if shared else 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))
