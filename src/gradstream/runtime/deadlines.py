"""`Deadlines`: how long a run waits before it gives up, and all time-outs derived from these.

Membership, the streams of all carriers, and the carriers themselves take their time-outs from here. The
time-out of a connection (`connection_s`) is longer than all others: so membership or a stream decides that a
peer is lost, and no carrier cuts the connection first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# ---- deadlines ---------------------------------------------------------------------------

BEATS_PER_LEASE = 40
NOTICES_PER_LEASE = 4

STILL = (
    "its process stands still (stopped, swapping, or in code that lets no other thread run), or its machine or the "
    "network is gone"
)
"""Why a node is silent."""


def to_wait_longer(setting: str) -> str:
    """How a user sets a longer deadline, in Python and on a command line."""
    return f"to wait longer: deadlines=gradstream.Deadlines({setting}=...), or --set deadlines.{setting}="


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long a run waits before it gives up, in seconds. All bound silence, not work.

    Args:
        join_s: time until all nodes have joined, including the time to build models and read data.
        silence_s: the longest silence of a peer that owes an answer.
        lease_s: the longest silence of a node before it counts as lost.
        retry_s: time until a push or fetch succeeds, over all its retries.
        cut_s: the longest pause of workers for a checkpoint, including the minibatches that they finish.
        coordinator_s: the longest silence of the coordinator before the other nodes end the run. Training
            continues without it meanwhile. The end of the coordinator's process is noticed at once.

    Example:
        >>> deadlines = gs.Deadlines(lease_s=30.0)  # for machines that pause
        >>> job = gs.Job(model, data, strategy="downpour", workers=2, epochs=2, deadlines=deadlines)
    """

    join_s: float = 60.0
    silence_s: float = 30.0
    lease_s: float = 10.0
    retry_s: float = 120.0
    cut_s: float = 120.0
    coordinator_s: float = 120.0

    @property
    def beat_s(self) -> float:
        """The longest time between two heartbeats, or attempts to send one, from a node to the coordinator."""
        return self.lease_s / BEATS_PER_LEASE

    @property
    def notice_s(self) -> float:
        """The longest time between two messages of the coordinator to a node; without news it sends a heartbeat."""
        return self.lease_s / NOTICES_PER_LEASE

    @property
    def patience_s(self) -> float:
        """How long the coordinator may be silent before a node counts it as lost, in seconds.

        It is at least `lease_s`, so that the coordinator gives up the node first.
        """
        return max(self.coordinator_s, self.lease_s)

    @property
    def connection_s(self) -> float:
        """The silence of the peer's system (not of its process) after which a carrier ends a connection.

        The other bounds end a stream earlier. This one ends connections to a lost machine for which no stream
        waits. Carriers send a probe after half of the time, and wait for the answer during the other half,
        which is still longer than the other bounds.
        """
        return 3 * max(self.silence_s, self.patience_s)


# ---- stalls ------------------------------------------------------------------------------
# Stalls: the times in which this node itself stood still, and the silence of peers that they excuse.
#
# A process that was stopped (SIGSTOP, a suspended machine), or whose event loop was blocked, wakes up with expired
# timers, although frames of its peers lie unread in its sockets. It must not take its own stall for their silence::
#
#     heard ───────── stopped ═════════════════ woke ── reads ──────────▶ now
#           counted          not counted            counted from here on
#
# `Stalls` decides from times alone. `StallWatch` notices stalls in real time.

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
            now_ns: the current time, on the same clock.
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
