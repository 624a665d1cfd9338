"""Coordinator and servers of a run whose workers somebody else starts, torchrun for one."""

from __future__ import annotations

import threading
from pathlib import Path

from gradstream.config import Job
from gradstream.train import host

__all__ = ["Host"]


class Host:
    """Runs them until the run is over, or this process has ended.

    Args:
        job: of the run, with as many workers as there will be.
        processes: whether they are processes, or threads of this one.
    """

    def __init__(self, job: Job, *, processes: bool = True) -> None:
        self._job = job
        self._processes = processes
        self._ready = threading.Event()
        self._where: tuple[str, str] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="gradstream-host", daemon=True)

    def start(self) -> tuple[str, str]:
        """(file that nodes are told by, address of the coordinator), once it is there.

        Raises:
            ConfigError, DeadlineError, PeerLostError: it did not come about.
        """
        self._thread.start()
        self._ready.wait()
        if self._where is None:
            assert self._error is not None
            raise self._error
        return self._where

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until the run is over and everybody has left."""
        self._thread.join(timeout_s)

    def _live(self) -> None:
        try:
            host(self._job, self._told, processes=self._processes)
        except BaseException as error:
            self._error = error  # once the run is on, this process's own worker is told by the coordinator
        finally:
            self._ready.set()

    def _told(self, spec: Path, coordinator: str) -> None:
        self._where = (str(spec), coordinator)
        self._ready.set()
