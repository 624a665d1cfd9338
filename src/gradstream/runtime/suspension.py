"""`Suspension`: a simulated node stands still, as a process that was stopped, or with its whole machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from gradstream.runtime.stalls import Stalls

READ_NS = 1_000_000
"""When the node goes on, expired timers fire first; so much later it reads the frames that wait."""


class _Clock(Protocol):
    now_ns: int

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> object: ...


class Suspension:
    """Holds the timers, results and frames of a node while it stands still.

    Args:
        clock: the clock of the simulation.
        stalls: the node's; they take each suspension that the node notices.

    Attributes:
        active: whether the node stands still now.
        num_held: number of timers, results and frames that were held so far.
        missed_ns: time in which the node's own clock stood still as well.
    """

    def __init__(self, clock: _Clock, stalls: Stalls) -> None:
        self.active = False
        self.num_held = 0
        self.missed_ns = 0
        self._clock = clock
        self._stalls = stalls
        self._since_ns = 0
        self._late: list[Callable[[], None]] = []
        self._unread = deque[Callable[[], None]]()

    def begin(self) -> None:
        """The node stands still from now on."""
        self.active, self._since_ns = True, self._clock.now_ns

    def end(self, *, noticed: bool = True, with_clock: bool = False) -> None:
        """The node goes on.

        Args:
            noticed: it knows that it stood still; if not, it believes that others were silent.
            with_clock: its clock stood still too, so there is nothing to notice, and timers are due later.
        """
        if not self.active:
            return
        now_ns = self._clock.now_ns
        if with_clock:
            self.missed_ns += now_ns - self._since_ns
        elif noticed:
            self._stalls.add(self._since_ns - self.missed_ns, now_ns - self.missed_ns)
        self._release()
        self._clock.call_at(now_ns + READ_NS, self._read)

    def kill(self) -> None:
        """Ends it for good: nobody reads the frames any more."""
        self._unread.clear()
        self._release()

    def _release(self) -> None:
        self.active = False
        late, self._late = self._late, []
        for call in late:
            call()

    def act(self, call: Callable[[], None]) -> None:
        """Calls now, or when the node goes on."""
        if self.active:
            self.num_held += 1
            self._late.append(call)
        else:
            call()

    def read(self, deliver: Callable[[], None]) -> None:
        """Delivers a frame now, or behind those that wait to be read."""
        if self.active or self._unread:
            self.num_held += self.active
            self._unread.append(deliver)
        else:
            deliver()

    def _read(self) -> None:
        while self._unread and not self.active:
            self._unread.popleft()()
