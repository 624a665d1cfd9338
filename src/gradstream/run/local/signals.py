"""Handles Ctrl-C and SIGTERM during a run: the first asks it to stop, the second ends it at once.

A further SIGTERM changes nothing: the processes of the run are being ended.

The launcher passes it on to nodes as `stop_signal`. Slurm sends SIGTERM to all processes of a step at once, nodes
included; there they ignore it, and wait for what the launcher decides.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def stop_signal() -> signal.Signals:
    """The signal by which a launcher asks a coordinator to stop and a worker to leave, in this environment."""
    return signal.SIGUSR1 if "SLURM_STEP_NUM_TASKS" in os.environ else signal.SIGTERM


def sigterm_of_nodes() -> signal.Handlers:
    """What a node does at SIGTERM before it has a handler of its own."""
    return signal.SIG_DFL if stop_signal() is signal.SIGTERM else signal.SIG_IGN


class StopSignals:
    """Handles the two signals of this process. Use it as a context manager, in the main thread.

    In another thread, where Python does not allow signal handlers, it does nothing. A signal that was
    ignored before (a script under `nohup`, or in the background of a shell) stays ignored.

    Attributes:
        asked: whether a signal has come.
    """

    def __init__(self) -> None:
        self.asked = False
        self._ended = False
        self._is_held = False
        self._late: int | None = None  # a signal that was put off
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Puts off a second signal, which ends this process, to the end of the context."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._late is not None:
            self._handle(self._late, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self.asked:
            self.asked = True
        elif self._is_held:
            self._late = number
        elif number != signal.SIGTERM:
            raise KeyboardInterrupt
        elif not self._ended:
            self._ended = True
            raise SystemExit(128 + number)
