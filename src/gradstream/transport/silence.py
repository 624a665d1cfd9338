"""Waiting, with a deadline that bounds the peer's silence and not the wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gradstream.runtime.base import Runtime, Timer

__all__ = ["Broadcast", "Silence"]

_NS = 1_000_000_000


class Broadcast:
    """Wakes everybody who waits at the moment it rings."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        """Wakes who waits now, in the order of their coming."""
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
    """When the peer was heard last, and an alarm for when that is too long ago.

    Args:
        runtime: of this node.
        bells: whoever waits, waits for one of these; all ring at an alarm, and who is woken looks again.
    """

    def __init__(self, runtime: Runtime, *bells: Broadcast) -> None:
        self.heard_ns = runtime.now()
        self._runtime = runtime
        self._bells = bells
        self._alarm: Timer | None = None
        self._alarm_ns = 0

    def heard(self) -> None:
        """The peer has sent something."""
        self.heard_ns = self._runtime.now()

    async def until(self, bell: Broadcast, ready: Callable[[], bool], silence_s: float | None) -> bool:
        """Waits until `ready`, which can change when `bell` rings.

        Args:
            silence_s: how long the peer may be silent from now on; None for as long as it likes.

        Returns:
            False where nothing at all was heard for so long, while this node was there to hear it.
        """
        begun_ns = self._runtime.now()
        while not ready():
            if silence_s is not None:
                left_s = self._runtime.left_s(max(begun_ns, self.heard_ns), silence_s)
                if left_s <= 0:
                    return False
                self._set_alarm(round(left_s * _NS))
            await bell.wait()
        return True

    def over(self) -> None:
        """Nobody is waited for any more: wakes all who wait."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._ring()

    def _set_alarm(self, left_ns: int) -> None:
        """Rings in `left_ns` or earlier: a pending alarm serves many waits."""
        due_ns = self._runtime.now() + left_ns
        if self._alarm is not None:
            if self._alarm_ns <= due_ns:
                return
            self._alarm.cancel()
        self._alarm, self._alarm_ns = self._runtime.call_later(left_ns / _NS, self._ring), due_ns

    def _ring(self) -> None:
        self._alarm = None
        for bell in self._bells:
            bell.ring()
