"""`Lifeline`: a node shows that it is alive while the coordinator is silent.

A connection that has lost packets sends them again after growing pauses (0.2 s, 0.4 s, 0.8 s, and so on), so
it may stay silent long after the network works again. A new connection does not. So a node that has not heard
the coordinator for some time says "alive" over new connections, one every `Deadlines.beat_s`. If the
coordinator answers there while the first connection is still silent, the node moves its presence to another
connection (see `Presence`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gradstream.coordinator.client.presence import EVICTED, Presence
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import GradstreamError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.transport.base import Endpoint
from gradstream.wire import v1

_log = logging.getLogger(__name__)

MAX_TRIES = 8
"""Most attempts at a time; half of the connections that the coordinator allows a node (`LIMITS.sessions`)."""

REFUSED = "refused"
"""Every operating system says this of a port at which no process listens."""


class EvictedError(GradstreamError):
    """The coordinator has counted this node as lost; the run continues without it, or has ended.

    Args:
        node: name of this node.
        reason: the coordinator's reason.
    """

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(
            f"{node} was stopped, or cut off from the coordinator, for longer than its lease: the "
            f"coordinator has counted it as lost ({reason}), and takes nothing from it any more. "
            "Resume the run, if it has ended; raise deadlines.lease_s where such pauses are to be expected"
        )


class Lifeline:
    """Watches how long the coordinator has been silent, and says "alive" over new connections.

    Args:
        runtime: time and tasks.
        endpoint: endpoint of this node.
        presence: presence of this node.
        deadlines: bound the silence of the coordinator.
        on_lost: called once, if this node was evicted or the coordinator's process has ended.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        presence: Presence,
        deadlines: Deadlines,
        on_lost: Callable[[GradstreamError], None],
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._presence = presence
        self._deadlines = deadlines
        self._on_lost = on_lost
        self._tries: dict[asyncio.Task[None], bool] = {}  # and whether the coordinator has answered
        self._lost = False

    async def run(self) -> None:
        """Watches until it is cancelled."""
        deadlines, pause_s = self._deadlines, self._deadlines.beat_s
        long_s = deadlines.lease_s + 2 * deadlines.notice_s
        warned = False
        try:
            while True:
                await self._runtime.sleep(pause_s)
                pause_s = deadlines.beat_s
                if self._left_s(1.5 * deadlines.notice_s) > 0:
                    warned = False
                    continue
                self._try()
                if self._left_s(long_s) > 0:
                    continue
                # By now the coordinator has counted this node as lost, or is suspended: there is no hurry.
                pause_s = deadlines.lease_s / 2
                if not warned:
                    warned = True
                    _log.warning(
                        "%s: waits for the coordinator, which has been silent for %g s. This node goes on as "
                        "far as it can without, and gives up after %g s in all (deadlines.coordinator_s)",
                        self._runtime.node,
                        long_s,
                        deadlines.patience_s,
                    )
        finally:
            for task in list(self._tries):
                task.cancel()

    def _try(self) -> None:
        unanswered = [task for task, answered in self._tries.items() if not answered]
        if len(unanswered) >= MAX_TRIES:
            unanswered[0].cancel()  # closes its connection, so that a suspended peer wakes up to only a few
        task = self._runtime.spawn(self._say_alive(), name=f"{self._runtime.node}: alive")
        self._tries[task] = False
        task.add_done_callback(lambda done: self._tries.pop(done, None))

    def _left_s(self, seconds: float) -> float:
        return self._runtime.left_s(self._presence.heard_ns, seconds)

    async def _say_alive(self) -> None:
        heard_ns = self._presence.heard_ns
        try:
            silence_s = self._deadlines.lease_s / 2
            await self._endpoint.call(
                COORDINATOR, "alive", v1.Body(), v1.Body, silence_s=silence_s, new_connection=True
            )
            this = asyncio.current_task()
            if this in self._tries:
                self._tries[this] = True
            if self._presence.heard_ns == heard_ns:
                await self._presence.resume()
        except RefusedError as error:
            if error.code in EVICTED:  # other refusals may pass, such as too many connections
                self._lose(EvictedError(self._runtime.node, error.reason))
        except PeerLostError as error:
            if REFUSED in str(error).lower() and not self._presence.comes_back:
                self._lose(error)
        except GradstreamError:
            pass  # the next attempt may succeed

    def _lose(self, error: GradstreamError) -> None:
        if not self._lost:
            self._lost = True
            self._on_lost(error)
