"""`Wakeup`: one task tells another that it has something to do."""

from __future__ import annotations

import asyncio

from gradstream.runtime.base import Runtime


class Wakeup:
    """Wakes the waiting tasks when it is rung; a ring with no waiting task is kept."""

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
