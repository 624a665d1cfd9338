"""`Throttle`: one report a second at most, and a count of the reports that it held back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from gradstream.runtime.base import Runtime, Timer

T = TypeVar("T")


class Throttle(Generic[T]):
    """Passes on the first report at once, and then one every `every_s` seconds while more come.

    A later report stands for all that came since the one before; `pass_on` gets the number of the others.
    The count misses none: the last report that was held back is passed on at the end of its interval, or
    when the throttle is closed.

    Args:
        runtime: supplies the clock.
        pass_on: called with a report, and the number of further reports that it stands for.
        every_s: seconds between two reports.
    """

    def __init__(self, runtime: Runtime, pass_on: Callable[[T, int], None], *, every_s: float = 1.0) -> None:
        self._runtime = runtime
        self._pass_on = pass_on
        self._every_s = every_s
        self._timer: Timer | None = None
        self._held: T | None = None  # the latest report that was held back
        self._num_held = 0

    def tell(self, report: T, count: int = 1) -> None:
        """Takes a report, which may stand for `count` equal ones."""
        if self._timer is None:
            self._pass_on(report, count - 1)
            self._pause()
        else:
            self._held, self._num_held = report, self._num_held + count

    def close(self) -> None:
        """Passes on the report that is still held back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flush()

    def _pause(self) -> None:
        self._timer = self._runtime.call_later(self._every_s, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._flush():
            self._pause()

    def _flush(self) -> bool:
        """Passes on the report that was held back; False if there is none."""
        report, count = self._held, self._num_held
        self._held, self._num_held = None, 0
        if report is None or not count:
            return False
        self._pass_on(report, count - 1)
        return True
