"""The `shm` carrier: processes of one host read each other's payloads where they lie.

Frames go over a Unix socket as they do over TCP; their payloads stay in shared memory (see `channel`), or are
copied through it. Only processes of the same user in the same network namespace can connect.
"""

from __future__ import annotations

import secrets
import socket

from gradstream.errors import ConfigError
from gradstream.transport.socket.endpoint import SocketEndpoint
from gradstream.transport.socket.unix import check_peer, listen


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

    def _target(self, address: str) -> tuple[socket.socket, str]:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), "\0" + address

    def _admit(self, connected: socket.socket) -> None:
        try:
            check_peer(connected)
        except ConfigError as error:
            raise OSError(str(error)) from error
