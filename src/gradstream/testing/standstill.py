"""Suspends a node of a simulation for some time, as SIGSTOP suspends a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

from gradstream.runtime import VirtualCluster
from gradstream.runtime.base import Timer
from gradstream.transport.simulated import endpoint

__all__ = ["Standstill"]

READ_S = 1e-3
"""Delay from the firing of the expired timers to the reading of the waiting frames, when the node continues."""


class _Late:
    """A timer of the node. If it expires while the node is suspended, it fires when the node continues."""

    def __init__(self, standstill: Standstill, callback: Callable[[], None]) -> None:
        self._standstill = standstill
        self._callback: Callable[[], None] | None = callback
        self.timer: Timer | None = None

    def cancel(self) -> None:
        self._callback = None
        if self.timer is not None:
            self.timer.cancel()

    def fire(self) -> None:
        if self._standstill.suspended:
            self._standstill.late.append(self.fire)
        elif self._callback is not None:
            self._callback()


class Standstill:
    """A context manager that suspends one node of a simulation from `begin_s` to `end_s`.

    While the node is suspended, its timers do not fire, and the frames that it receives stay unread. When it
    continues, first the expired timers fire, then it reads the frames. Run the simulation inside the context;
    a context in which nothing was delayed raises AssertionError at its end.

    Args:
        cluster: machines of the simulation.
        node: name of the node.
        begin_s, end_s: begin and end of the suspension, in seconds of virtual time.
        noticed: whether the node's `runtime.stalls` records the suspension. If not, the node believes that the
            other nodes were silent during this time.

    Attributes:
        suspended: whether the node is suspended now.
        late: callbacks of the timers that have expired during the suspension.
        num_held: number of timers and frames that the suspension has delayed.
    """

    def __init__(
        self, cluster: VirtualCluster, node: str, begin_s: float, end_s: float, *, noticed: bool = True
    ) -> None:
        self.suspended = False
        self.late: list[Callable[[], None]] = []
        self.num_held = 0
        self._unread: list[Callable[[], None]] = []
        self._cluster = cluster
        self._runtime = cluster.runtime(node)
        self._noticed = noticed
        self._begin_ns, self._end_ns = round(begin_s * 1e9), round(end_s * 1e9)
        cluster.clock.call_at(self._begin_ns, self._begin)
        cluster.clock.call_at(self._end_ns, self._end)
        call_later, take, standstill = self._runtime.call_later, endpoint._End.take, self

        def call(seconds: float, callback: Callable[[], None]) -> Timer:
            late = _Late(standstill, callback)
            late.timer = call_later(seconds, late.fire)
            return late

        def hold(end: Any, *given: Any) -> None:
            if standstill.suspended and end.out.source == node:
                standstill._unread.append(partial(take, end, *given))
            else:
                take(end, *given)

        self._patches: list[Any] = [
            patch.object(self._runtime, "call_later", call),
            patch.object(endpoint._End, "take", hold),
        ]

    def __enter__(self) -> Self:
        for one in self._patches:
            one.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._patches:
            one.stop()
        if kind is None and not self.num_held:
            raise AssertionError("nothing was delayed: the node had no timers, and got no frames")

    def _begin(self) -> None:
        self.suspended = True

    def _end(self) -> None:
        self.suspended = False
        self.num_held = len(self.late) + len(self._unread)
        if self._noticed:
            self._runtime.stalls.add(self._begin_ns, self._end_ns)
        for fire in self.late:
            fire()
        self._cluster.clock.call_at(self._end_ns + round(READ_S * 1e9), self._read)

    def _read(self) -> None:
        for deliver in self._unread:
            deliver()
