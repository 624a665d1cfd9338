"""Task primitives with a defined order, on top of asyncio and a runtime's timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from gradstream.memory import Loans
from gradstream.runtime.base import Report, Runtime, Timer

# ---- tasks -------------------------------------------------------------------------------

T = TypeVar("T")

_NS = 1_000_000_000


async def let_others_run() -> None:
    """Lets the other tasks that are ready run up to where they wait."""
    await asyncio.sleep(0)


async def finish_despite_cancel(future: asyncio.Future[T]) -> T:
    """Awaits a future to its end; raises a cancellation that came meanwhile afterwards.

    Arithmetic cannot be interrupted, so the memory it works on cannot be given back earlier.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
        except BaseException:
            break
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not log it: the cancellation is raised
        raise cancelled
    return future.result()


async def interrupt_on_cancel(future: asyncio.Future[T], interrupt: Callable[[], object]) -> T:
    """As `finish_despite_cancel`, but a cancellation first calls a function that ends the thread's work early."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        interrupt()
        with suppress(BaseException):
            await finish_despite_cancel(future)
        raise


def release_then(loans: Loans, on_progress: Report) -> Report:
    """Makes a report that first returns the part of the written memory that is final."""

    def progressed(elems: int) -> None:
        loans.release_below(elems)
        on_progress(elems)

    return progressed


# ---- wakeup ------------------------------------------------------------------------------
# `Wakeup`: one task tells another that it has something to do.


class Wakeup:
    """Wakes the waiting tasks when it is rung; a ring without waiting tasks is kept."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wakes the waiting tasks."""
        self._event.set()

    async def rung(self, runtime: Runtime, seconds: float) -> bool:
        """Waits for a ring for at most `seconds`, and consumes it; returns whether it came."""
        try:
            await runtime.within(seconds, self._event.wait())
        except TimeoutError:
            return False
        self._event.clear()
        return True


# ---- throttle ----------------------------------------------------------------------------
# `Throttle`: one report a second at most, and a count of the reports that it held back.


class Throttle(Generic[T]):
    """Passes on the first report at once, and then one every `every_s` seconds while more come.

    A later report stands for all that came since the previous one; `pass_on` gets the number of the others.
    The count is complete: the last report that was held back is passed on at the end of its interval, or
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


# ---- silence -----------------------------------------------------------------------------
# Waiting with a deadline that bounds the peer's silence rather than the wait.


class Broadcast:
    """Wakes all tasks that wait for it."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        """Wakes the tasks that wait now, in the order in which they began to wait."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Returns at the next ring."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


class Silence:
    """The time at which the peer was last heard, and an alarm for when that is too long ago.

    Args:
        changes: broadcasts that tasks wait for; an alarm rings all of them, and each task checks again.
    """

    def __init__(self, runtime: Runtime, *changes: Broadcast) -> None:
        self.heard_ns = runtime.now()
        self._runtime = runtime
        self._changes = changes
        self._alarm: Timer | None = None
        self._alarm_ns = 0

    def heard(self) -> None:
        """Notes that the peer has sent a frame."""
        self.heard_ns = self._runtime.now()

    async def until(self, changed: Broadcast, ready: Callable[[], bool], silence_s: float | None) -> bool:
        """Waits until `ready`.

        Args:
            changed: rings when `ready` may have changed.
            silence_s: seconds for which the peer may be silent from now on; None is no limit.

        Returns:
            False if the peer was silent for so long; time in which this node stood still does not count.
        """
        begun_ns = self._runtime.now()
        while not ready():
            if silence_s is not None:
                left_s = self._runtime.left_s(max(begun_ns, self.heard_ns), silence_s)
                if left_s <= 0:
                    return False
                self._set_alarm(round(left_s * _NS))
            await changed.wait()
        return True

    def over(self) -> None:
        """Cancels the alarm, and wakes all waiting tasks."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._ring()

    def _set_alarm(self, left_ns: int) -> None:
        """Makes the alarm ring in `left_ns` or earlier: one pending alarm serves many waits."""
        due_ns = self._runtime.now() + left_ns
        if self._alarm is not None:
            if self._alarm_ns <= due_ns:
                return
            self._alarm.cancel()
        self._alarm, self._alarm_ns = self._runtime.call_later(left_ns / _NS, self._ring), due_ns

    def _ring(self) -> None:
        self._alarm = None
        for changed in self._changes:
            changed.ring()
