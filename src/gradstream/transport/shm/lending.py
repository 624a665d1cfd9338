"""Lending: payloads that stay where they lie, in memory that two processes of a host share.

Beside the streams of two nodes there is a channel, a Unix socket over which each side hands out the
descriptors of its segments. From then on a chunk can go as a *reference*: segment, offset, size, and the
number of a loan. The receiver reads in place; when it refers to the payload no more, the loan is returned::

    lender                                       borrower
    segment 3, its descriptor ─────────────────▶ maps it, read-only
                              ◀───────────────── attached 3
    chunk, by a stream: reference, loan 17 ────▶ payload is a view
                              ◀───────────────── returned 17

What does not lie in a segment is copied into one, the *shelf* of the channel; what finds no place there
goes with its stream, as everywhere. So nobody waits for a loan but who wants to write the memory again.

Whoever opens a stream has connected the channel that its references belong to, in both directions. When
the channel ends, so do its loans: that of a dead process reads nothing more; one that lives has its mapping,
but must not believe what it has not finished reading. Sizes and places that a peer names are checked
against the segment as it was mapped, whose size is sealed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from google.protobuf.message import DecodeError

from gradstream.errors import ConfigError
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Identity
from gradstream.transport.shm.channel import MAX_PACKET_BYTES, Channel
from gradstream.transport.socket.unix import check_peer, listen
from gradstream.wire import v1

__all__ = ["Lending"]

_HELLO_S = 10.0  # who connects and says nothing is sent away after this

K = TypeVar("K")

_log = logging.getLogger(__name__)
_channels = itertools.count(1)


class Lending:
    """All channels of an endpoint.

    Args:
        runtime: of the node.
        identity: of its endpoint.
    """

    def __init__(self, runtime: Runtime, identity: Identity) -> None:
        self._runtime = runtime
        self._identity = identity
        self._listener: socket.socket | None = None
        self._outgoing: dict[str, Channel] = {}  # by peer
        self._incoming: dict[tuple[str, int], Channel] = {}  # by peer and incarnation
        self._strangers: dict[socket.socket, Callable[[], None]] = {}  # connected, and nothing said yet

    def start(self, address: str) -> None:
        """Lets peers that know the endpoint by `address` connect. Raises ConfigError when that is taken."""
        self._listener = listen(_name_of(address), socket.SOCK_SEQPACKET)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def towards(self, peer: str, address: str) -> Channel | None:
        """The channel for streams opened to a peer; None where it is not on this host."""
        channel = self._outgoing.get(peer)
        if channel is not None:
            return channel
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            connection.connect(_name_of(address))
            check_peer(connection)
        except (OSError, ConfigError):
            connection.close()
            return None
        mine, number = self._identity, next(_channels)
        hello = v1.Lending.Hello(job=mine.job, sender=mine.name, incarnation=mine.incarnation, channel=number)
        connection.send(v1.Lending(hello=hello).SerializeToString())
        channel = Channel(self._runtime, connection, number, peer, partial(_remove, self._outgoing, peer))
        self._outgoing[peer] = channel
        return channel

    def with_sender(self, sender: str, incarnation: int) -> Channel | None:
        """The channel for streams that a peer has opened."""
        return self._incoming.get((sender, incarnation))

    def hang_up(self, peer: str) -> None:
        """Ends the channel to a peer whose address has changed."""
        if peer in self._outgoing:
            self._outgoing[peer].close("its address has changed")

    def close(self) -> None:
        """Ends all channels and stops accepting. Idempotent."""
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for stranger in list(self._strangers):
            self._send_away(stranger)
        for channel in [*self._outgoing.values(), *self._incoming.values()]:
            channel.close(f"{self._identity.name} closes")

    # ---- those who connect ----------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        try:
            check_peer(connection)
        except ConfigError as error:
            _log.warning("%s: %s", self._identity.name, error)
            connection.close()
            return
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._greeted, connection)
        timer = self._runtime.expire_after(_HELLO_S, partial(self._send_away, connection))
        self._strangers[connection] = timer.cancel

    def _send_away(self, connection: socket.socket) -> None:
        self._part(connection)
        connection.close()

    def _part(self, connection: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(connection)
        self._strangers.pop(connection)()

    def _greeted(self, connection: socket.socket) -> None:
        try:
            hello = v1.Lending.FromString(connection.recv(MAX_PACKET_BYTES)).hello
        except BlockingIOError:
            return
        except (OSError, DecodeError):
            hello = v1.Lending.Hello()
        if not hello.sender or hello.job != self._identity.job:
            self._send_away(connection)
            return
        self._part(connection)
        key = (hello.sender, hello.incarnation)
        if key in self._incoming:
            self._incoming[key].close("it has connected again")
        over = partial(_remove, self._incoming, key)
        self._incoming[key] = Channel(self._runtime, connection, hello.channel, hello.sender, over)


def _remove(channels: dict[K, Channel], key: K, channel: Channel) -> None:
    if channels.get(key) is channel:
        del channels[key]


def _name_of(address: str) -> str:
    """The abstract name of where the channels of an endpoint are connected to."""
    return f"\0gradstream/{address.strip(chr(0))}/memory"
