"""Waiting with a deadline that bounds the peer's silence, and not the wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gradstream.runtime.base import Runtime, Timer

_NS = 1_000_000_000


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
        runtime: runtime of this node.
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
            ready: the condition.
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
