"""Stalls: the times in which this node itself stood still, and the silence of peers that they excuse.

A process that was stopped (SIGSTOP, a suspended machine), or whose event loop was blocked, wakes up with
expired timers, although frames of its peers lie unread in its sockets. It must not take its own stall for
their silence::

    heard ───────── stopped ═════════════════ woke ── reads ──────────▶ now
          counted          not counted            counted from here on

`Stalls` decides from times alone. `StallWatch` notices stalls in real time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

LONG = 8
"""A stall of an eighth of a bound or more restarts the bound; the time of a shorter one does not count."""

REMEMBERED = 64

_NS = 1_000_000_000


class Stalls:
    """Remembers when a node stalled, and for how long a silent peer is still excused by that.

    Times are nanoseconds of the runtime's clock.
    """

    def __init__(self) -> None:
        self.total_ns = 0
        self._stalls: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)

    def add(self, begin_ns: int, end_ns: int) -> None:
        """Adds a stall from `begin_ns` to `end_ns`, which is now."""
        self.total_ns += end_ns - begin_ns
        self._stalls.append((begin_ns, end_ns))

    def left_ns(self, since_ns: int, bound_ns: int, now_ns: int) -> int:
        """Nanoseconds for which a peer may still be silent; 0 or less if it has been silent for too long.

        If this process itself has stalled, messages of the peer may wait unread in its sockets. The result is then
        at least `bound_ns / LONG` from the end of the stall, so that they are read before the peer is judged.

        Args:
            since_ns: when this node last heard the peer, on the clock of the event loop.
            bound_ns: the longest silence allowed.
            now_ns: the present time, on the same clock.
        """
        counted_ns, woke_ns = now_ns - since_ns, since_ns - bound_ns
        for begin_ns, end_ns in self._stalls:
            stood_ns = end_ns - max(begin_ns, since_ns)
            if stood_ns <= 0:
                continue
            woke_ns = end_ns
            counted_ns = now_ns - end_ns if LONG * stood_ns >= bound_ns else counted_ns - stood_ns
        return max(bound_ns - counted_ns, woke_ns + bound_ns // LONG - now_ns)


class StallWatch:
    """Notices stalls of the running event loop: it looks at the clock regularly, and a look comes too late.

    It begins at the first `look` on a loop, and continues as long as that loop runs.

    Args:
        stalls: takes the stalls.
        now: returns nanoseconds of the runtime's clock.
    """

    PERIOD_S = 0.25
    SHORTEST_S = 0.25
    """A look that is late by more than this was delayed by a stall; by less, by a busy loop."""

    def __init__(self, stalls: Stalls, now: Callable[[], int]) -> None:
        self._stalls = stalls
        self._now = now
        self._looked_ns = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def look(self) -> int:
        """Notes the stall that has just ended, if there was one, and returns the time."""
        now_ns, loop = self._now(), asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            loop.call_later(self.PERIOD_S, self._keep_looking, loop)
        elif now_ns - self._looked_ns > (self.PERIOD_S + self.SHORTEST_S) * _NS:
            self._stalls.add(self._looked_ns, now_ns)
        self._looked_ns = now_ns
        return now_ns

    def _keep_looking(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is self._loop:
            self.look()
            loop.call_later(self.PERIOD_S, self._keep_looking, loop)
