"""TLS over a stream socket, with the few methods of a non-blocking socket that carriers and data sockets use.

OpenSSL encrypts and decrypts in memory (`ssl.MemoryBIO`), and frees the GIL meanwhile; one system call moves
many records. Payloads are encrypted from where they lie, and decrypted into their final place.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from typing import cast

from gradstream.transport.base import ByteSocket
from gradstream.transport.security import Shown, Tls

_READ_BYTES = 256 << 10  # of one system call
_BEGIN_BYTES = 16 << 10  # the same before the caller is known


class TlsSocket:
    """A connected socket whose bytes are encrypted. Not for two threads at a time, except `shutdown`.

    It has no method that would send plain text.

    Args:
        connected: non-blocking; this object closes it.
        tls: authority, certificate and key of this side.
        peer: name of the called node; None at the called side.

    Attributes:
        more: bytes may have been received that the system no longer reports as readable: read on.
        shown: certificate of the peer, once `handshake` has returned.
    """

    shown: Shown

    def __init__(self, connected: socket.socket, tls: Tls, peer: str | None) -> None:
        self.more = True
        self._socket = connected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._records = tls.context(calls=peer is not None).wrap_bio(
            self._incoming, self._outgoing, server_side=peer is None, server_hostname=peer
        )
        self._room = memoryview(b"")
        self._encrypted = memoryview(b"")  # what the system has not taken
        self._owed_bytes = 0  # of plain text, of which `_encrypted` is the rest

    # ---- the beginning, while the event loop waits -------------------------------------------

    async def handshake(self) -> None:
        """Returns once both sides have shown a certificate of this run, as far as this side can know.

        A called side that refuses this side's certificate may say so only as the answer to the first bytes.

        Raises:
            OSError: `ssl.SSLError` if the peer is not who it should be, or speaks no TLS; or the connection is lost.
        """
        try:
            while True:
                try:
                    self._records.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._pull()
        except ssl.SSLError:
            await self._flush()  # the alert, which tells the peer why
            raise
        await self._flush()
        shown = self._records.getpeercert(binary_form=True)
        assert shown is not None  # both sides demand one
        self.shown = Shown.read(ssl.DER_cert_to_PEM_cert(shown).encode())
        self._room = memoryview(bytearray(_READ_BYTES))

    async def sendall(self, data: bytes) -> None:
        """Sends all of it."""
        self._records.write(data)
        await self._flush()

    async def recv(self, num_bytes: int) -> bytes:
        """The next bytes, `num_bytes` at most; b"" after the last."""
        while True:
            try:
                return bytes(self._records.read(num_bytes))
            except ssl.SSLWantReadError:
                try:
                    await self._pull()
                except ConnectionResetError:
                    return b""

    async def _flush(self) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, self._outgoing.read())

    async def _pull(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self._socket, _BEGIN_BYTES)
        if not data:
            raise ConnectionResetError("the connection was closed")
        self._incoming.write(data)

    # ---- as a non-blocking socket ------------------------------------------------------------

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Sends all bytes of the buffers, and returns their number.

        Raises:
            BlockingIOError: the system has not taken them all. They are encrypted: the buffers of the next call
                must begin with the same bytes.
        """
        if not self._encrypted:
            self._owed_bytes = sum(self._records.write(buffer) for buffer in buffers if len(buffer))
            self._encrypted = memoryview(self._outgoing.read())
        while self._encrypted:
            self._encrypted = self._encrypted[self._socket.send(self._encrypted) :]
        return self._owed_bytes

    def recv_into(self, buffer: memoryview) -> int:
        """See `socket.socket.recv_into`; makes one system call at most."""
        got, self.more = 0, False
        while got < len(buffer):
            try:
                # One record at most. Stubs say bytes, which it returns without a buffer.
                num_bytes = cast("int", self._records.read(len(buffer) - got, buffer[got:]))
            except ssl.SSLWantReadError:
                if got:
                    return got
                came = self._socket.recv_into(self._room)
                if not came:
                    return 0
                self._incoming.write(self._room[:came])
                continue
            if not num_bytes:
                return got
            got += num_bytes
        self.more = True
        return got

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int]:
        """See `socket.socket.recvmsg_into`."""
        got = 0
        for buffer in buffers:
            try:
                got += self.recv_into(buffer)
            except BlockingIOError:
                if not got:
                    raise
            if not self.more:
                break
        return (got,)

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._socket.fileno()

    def getpeername(self) -> object:
        """See `socket.socket.getpeername`."""
        return self._socket.getpeername()

    def shutdown(self, how: int) -> None:
        """See `socket.socket.shutdown`. Any thread may call it."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


def has_more(connected: ByteSocket) -> bool:
    """Whether to read on, though the system may not report the socket as readable."""
    return isinstance(connected, TlsSocket) and connected.more
