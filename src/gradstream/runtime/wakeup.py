"""A bell: wakes who waits for news."""

from __future__ import annotations

import asyncio

from gradstream.runtime.base import Runtime

__all__ = ["Wakeup"]


class Wakeup:
    """Wakes everybody who waits when it is rung; a ring that nobody waits for is kept."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wakes who waits."""
        self._event.set()

    async def rung(self, runtime: Runtime, seconds: float) -> bool:
        """Returns whether it was rung within `seconds`, and takes the ring."""
        try:
            await runtime.within(seconds, self._event.wait())
        except TimeoutError:
            return False
        self._event.clear()
        return True
