"""Data sockets: connections beside the streams of two nodes, for a thread that moves bytes by itself.

A data socket begins with a greeting like every connection, so it is bound to a job, a node and the start of
the node's process. From then on it belongs to its two users, and carries the bytes that they agree on.
"""

from __future__ import annotations

import asyncio

from gradstream.runtime.base import Runtime
from gradstream.transport.base import PeerSocket

UNCLAIMED_S = 10.0  # a socket that nobody asks for is closed after this time


class DataSockets:
    """Keeps data sockets that peers have dialled until the node asks for them.

    Args:
        runtime: runtime of the node.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._arrived: dict[tuple[str, str], PeerSocket] = {}
        self._awaited: dict[tuple[str, str], asyncio.Future[PeerSocket]] = {}

    def arrived(self, peer: str, name: str, connected: PeerSocket) -> None:
        """Takes a socket that a peer has dialled. It replaces an unclaimed one of that name: the peer gave it up."""
        key = (peer, name)
        awaited = self._awaited.get(key)
        if awaited is not None and not awaited.done():
            awaited.set_result(connected)
            return
        if key in self._arrived:
            self._arrived[key].socket.close()
        self._arrived[key] = connected
        self._runtime.expire_after(UNCLAIMED_S, lambda: self._expire(key, connected))

    async def taken(self, peer: str, name: str) -> PeerSocket:
        """The data socket of that name, once the peer has dialled."""
        key = (peer, name)
        if key in self._arrived:
            return self._arrived.pop(key)
        awaited: asyncio.Future[PeerSocket] = asyncio.get_running_loop().create_future()
        self._awaited[key] = awaited
        try:
            return await awaited
        except asyncio.CancelledError:
            if awaited.done() and not awaited.cancelled():
                awaited.result().socket.close()  # it came at the moment of the cancellation
            raise
        finally:
            del self._awaited[key]

    def num_unclaimed(self, peer: str) -> int:
        """Number of data sockets of a peer that nobody has asked for yet."""
        return sum(of == peer for of, _ in self._arrived)

    def close(self) -> None:
        """Closes the sockets that nobody has asked for."""
        for connected in self._arrived.values():
            connected.socket.close()
        self._arrived.clear()

    def _expire(self, key: tuple[str, str], connected: PeerSocket) -> None:
        if self._arrived.get(key) is connected:
            self._arrived.pop(key).socket.close()
