"""Lines: sockets that two nodes have beside their streams, for a thread that moves bytes by itself.

A line begins with a greeting like every connection, so it is bound to a job, a node and the start of its
process; from then on it belongs to whoever has asked for it, and carries what those two have agreed on.
"""

from __future__ import annotations

import asyncio
import socket

from gradstream.runtime.base import Runtime

__all__ = ["DataSockets"]

UNCLAIMED_S = 10.0  # a line that nobody asks for is hung up after this


class DataSockets:
    """Lines that peers have dialled, until somebody takes them.

    Args:
        runtime: of the node.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._arrived: dict[tuple[str, str], socket.socket] = {}
        self._awaited: dict[tuple[str, str], asyncio.Future[socket.socket]] = {}

    def arrived(self, peer: str, name: str, connected: socket.socket) -> None:
        """A peer has dialled. A line of that name which nobody has taken was given up by the peer."""
        key = (peer, name)
        awaited = self._awaited.get(key)
        if awaited is not None and not awaited.done():
            awaited.set_result(connected)
            return
        if key in self._arrived:
            self._arrived[key].close()
        self._arrived[key] = connected
        self._runtime.expire_after(UNCLAIMED_S, lambda: self._expire(key, connected))

    async def taken(self, peer: str, name: str) -> socket.socket:
        """The line of that name, once the peer has dialled."""
        key = (peer, name)
        if key in self._arrived:
            return self._arrived.pop(key)
        awaited: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._awaited[key] = awaited
        try:
            return await awaited
        except asyncio.CancelledError:
            if awaited.done() and not awaited.cancelled():
                awaited.result().close()  # came at the moment at which it was given up
            raise
        finally:
            del self._awaited[key]

    def num_unclaimed(self, peer: str) -> int:
        """How many lines of a peer wait for somebody to take them."""
        return sum(of == peer for of, _ in self._arrived)

    def close(self) -> None:
        """Hangs up what nobody has taken."""
        for connected in self._arrived.values():
            connected.close()
        self._arrived.clear()

    def _expire(self, key: tuple[str, str], connected: socket.socket) -> None:
        if self._arrived.get(key) is connected:
            self._arrived.pop(key).close()
