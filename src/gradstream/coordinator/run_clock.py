"""`RunClock`: the time that the events of a run carry."""

from __future__ import annotations

from gradstream.runtime.base import Runtime

__all__ = ["RunClock"]


class RunClock:
    """Counts the seconds of training, those before the run was resumed included.

    Args:
        runtime: supplies the time.
        earlier_s: seconds of training before the run was resumed.
    """

    def __init__(self, runtime: Runtime, earlier_s: float = 0.0) -> None:
        self.earlier_s = earlier_s
        self._runtime = runtime
        self._began_ns: int | None = None

    def begin(self) -> bool:
        """Starts the clock; returns False if it runs already."""
        if self._began_ns is not None:
            return False
        self._began_ns = self._runtime.now()
        return True

    def time_s(self) -> float:
        """Seconds of training so far."""
        if self._began_ns is None:
            return self.earlier_s
        return self.earlier_s + (self._runtime.now() - self._began_ns) / 1e9
