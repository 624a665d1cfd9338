"""Carries out one rank's plan on sockets, on a thread of its own: as `ScheduleExecutor` does, without an event loop.

All that need not wait goes on at once, piece by piece. In each round the thread sends what may go, reads what
has arrived, and sums what is whole; it sleeps in the system's poll when there is nothing to do. So its time
goes into the system's copies and into sums, and next to none into Python.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping

from gradstream.collectives.plan import DependencyPlan
from gradstream.collectives.socket_io import (
    DataSocket,
    PlanProgress,
    SocketDirection,
    SocketReader,
    SocketWriter,
)
from gradstream.errors import InternalError

__all__ = ["SocketExecutor"]

_HUNG = select.POLLHUP | select.POLLERR | select.POLLNVAL


class SocketExecutor:
    """One operation, while it lasts.

    Args:
        passage: how far it is.
        plan: of this rank.
        lines: by rank.
        now: nanoseconds, of the node's runtime.
    """

    def __init__(
        self,
        passage: PlanProgress,
        plan: DependencyPlan,
        lines: Mapping[int, DataSocket],
        now: Callable[[], int],
    ) -> None:
        self._now = now
        self._text = passage.operation.text
        self._ins = [SocketReader(passage, own, lines[peer]) for peer, own in plan.recvs.items()]
        self._outs = [SocketWriter(passage, own, lines[peer]) for peer, own in plan.sends.items()]

    def play(self, patience_ms: int | None = None) -> bool:
        """Goes on until this rank has sent and received all that it is to. Blocks.

        Args:
            patience_ms: when to leave off, to be called again; None waits for as long as peers let it wait,
                until somebody shuts the sockets down.

        Returns:
            Whether all is done.

        Raises:
            PeerLostError: a rank is gone, or has left before it was done.
            ConfigError: another rank does something else.
        """
        until_ns = None if patience_ms is None else self._now() + patience_ms * 1_000_000
        ins, outs, watch = self._ins, self._outs, _Watch()
        while ins or outs:
            if until_ns is not None and self._now() >= until_ns:
                return False
            sending = [lane for lane in outs if lane.clear and lane.room_bytes()]
            for out in sending:
                out.move()
            receiving = {lane.number: lane for lane in ins if lane.room_bytes()}
            blocked = {lane.number: lane for lane in outs if not lane.clear}
            if not (sending or receiving or blocked):
                raise InternalError(f"{self._text}: its steps wait for each other in a circle")
            for lane in watch.ready(receiving, blocked, 0 if sending else patience_ms):
                lane.move()
            ins = [lane for lane in ins if not lane.is_done]
            outs = [lane for lane in outs if not lane.is_done]
        return True


class _Watch:
    """Which sockets can go on: poll, told only of what has changed since it was last asked."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._masks: dict[int, int] = {}

    def ready(
        self, ins: Mapping[int, SocketReader], outs: Mapping[int, SocketWriter], patience_ms: int | None
    ) -> list[SocketDirection]:
        """Lanes whose socket is ready within that time, by its number; those that receive first."""
        masks = dict.fromkeys(ins, select.POLLIN)
        for number in outs:
            masks[number] = masks.get(number, 0) | select.POLLOUT
        for number in self._masks.keys() - masks.keys():
            self._poll.unregister(number)
        for number, mask in masks.items():
            if self._masks.get(number) != mask:
                self._poll.register(number, mask)
        self._masks = masks
        found = self._poll.poll(patience_ms) if masks else []
        receiving = [ins[n] for n, event in found if n in ins and event & (select.POLLIN | _HUNG)]
        sending = [outs[n] for n, event in found if n in outs and event & (select.POLLOUT | _HUNG)]
        return [*receiving, *sending]
