"""The `shm` carrier: processes of one host read each other's payloads where they lie.

Frames go over a Unix socket as they do over TCP; their payloads stay in shared memory (see `channel`), or are
copied through it. Only processes of the same user in the same network namespace can connect.
"""

from __future__ import annotations

import asyncio
import secrets
import socket

from gradstream.errors import ConfigError
from gradstream.transport.socket.endpoint import SocketEndpoint
from gradstream.transport.socket.unix import check_peer, listen

__all__ = ["ShmEndpoint"]


class ShmEndpoint(SocketEndpoint):
    """An endpoint on Unix sockets and shared memory. Vectors in `SharedMemory` are sent without a copy.

    Args:
        identity, runtime, window: see `SocketEndpoint`.
    """

    async def start(self) -> None:
        """See `Endpoint.start`."""
        await super().start()
        self.share_memory()

    def _listen(self) -> tuple[socket.socket, str]:
        address = f"gradstream/{secrets.token_hex(16)}"  # every user can read the names of sockets
        return listen("\0" + address), address

    async def _connect(self, address: str) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connected, "\0" + address)
            self._admit(connected)
        except ConfigError as error:
            connected.close()
            raise OSError(str(error)) from error
        except BaseException:
            connected.close()
            raise
        return connected

    def _admit(self, connected: socket.socket) -> None:
        check_peer(connected)
