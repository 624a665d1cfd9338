"""Suspends a node of a run on this machine by SIGSTOP: its process stops, while the system keeps its connections."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradstream.run.local import LocalCluster

LOOK_S = 0.01


class Stopper:
    """Suspends a node once or several times. Give it to the run as `on_event`.

    Args:
        cluster: the nodes.
        node: name of the node to suspend.
        seconds: duration of each stop.
        times: number of stops.
        gap_s: time before each stop, in which the node runs, in seconds.
        kind: the first event of this kind begins the stops.

    Attributes:
        stopped_s: duration of each stop, from the time at which the system reports the process as stopped.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        node: str,
        seconds: float,
        *,
        times: int = 1,
        gap_s: float = 0.0,
        kind: str = "step",
    ) -> None:
        self.stopped_s: list[float] = []
        self._cluster = cluster
        self._node = node
        self._seconds = seconds
        self._times = times
        self._gap_s = gap_s
        self._kind = kind
        self._error = ""
        self._thread: threading.Thread | None = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Watches for the event that begins the stops."""
        if event["event"] == self._kind and self._thread is None:
            pid = self._cluster.running[self._node]
            self._thread = threading.Thread(target=self._stop_all, args=(pid,), daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Waits for the last stop.

        Raises:
            AssertionError: no stop began, or a signal did not stop the node.
        """
        assert self._thread is not None, f"no stop: no event {self._kind!r} came"
        self._thread.join()
        assert not self._error, self._error
        assert len(self.stopped_s) == self._times, f"{len(self.stopped_s)} stops of {self._times}"

    def _stop_all(self, pid: int) -> None:
        try:
            for _ in range(self._times):
                time.sleep(self._gap_s)
                self.stopped_s.append(self._stop(pid))
        except (OSError, RuntimeError) as error:
            self._error = f"{self._node}: {error}"

    def _stop(self, pid: int) -> float:
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(100):
                if _state(pid) == "T":
                    break
                time.sleep(LOOK_S)
            begun = time.monotonic()
            time.sleep(self._seconds)
            if _state(pid) != "T":
                raise RuntimeError(f"it was stopped, but is in state {_state(pid)}")
            return time.monotonic() - begun
        finally:
            os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    """The state of a process as Linux names it; "T" is stopped."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
