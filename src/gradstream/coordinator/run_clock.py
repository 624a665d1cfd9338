"""The time that the events of a run carry, and the time of the coordinator's state machines."""

from __future__ import annotations

from gradstream.runtime.base import Runtime


class RunClock:
    """Counts the seconds of training, those before the run was resumed included.

    Args:
        runtime: supplies the time.
        earlier_s: seconds of training before the run was resumed.
        zero_ns: that of the coordinator's clock, for a node on its machine that comes later; None: it begins anew.
    """

    KEPT = ("_began_ns",)
    """See `durable.state`."""

    def __init__(self, runtime: Runtime, earlier_s: float = 0.0, zero_ns: int | None = None) -> None:
        self.earlier_s = earlier_s
        self._runtime = runtime
        self._given_ns = zero_ns
        self._began_ns: int | None = None

    def begin(self) -> bool:
        """Starts the clock; returns False if it runs already."""
        if self._began_ns is not None:
            return False
        self._began_ns = self._runtime.now()
        if self._given_ns is not None:
            self._began_ns = self._given_ns + round(self.earlier_s * 1e9)
        return True

    @property
    def zero_ns(self) -> int | None:
        """Time of the machine at which it showed 0, or would have; None before it begins."""
        return None if self._began_ns is None else self._began_ns - round(self.earlier_s * 1e9)

    def time_s(self) -> float:
        """Seconds of training so far."""
        if self._began_ns is None:
            return self.earlier_s
        return self.earlier_s + (self._runtime.now() - self._began_ns) / 1e9


class Age:
    """Seconds since the first process of the coordinator began, without the time in which this one stood still.

    Args:
        runtime: supplies the time.
    """

    KEPT = ("_born_ns",)
    """See `durable.state`. The clock belongs to the machine, so a new process goes on counting."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._born_ns = runtime.now()
        self._stood_still_ns = runtime.now() - runtime.awake_ns()  # before this process began

    def __call__(self) -> float:
        """The present age."""
        return (self._runtime.awake_ns() + self._stood_still_ns - self._born_ns) / 1e9
