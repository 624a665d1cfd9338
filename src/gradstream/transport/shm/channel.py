"""Payload channels: payloads that stay in place, in memory that two processes of a host share.

Two nodes have a channel beside their streams: a Unix socket over which each side hands out the
descriptors of its segments. From then on a chunk can go as a *reference*: segment, offset, size, and the
number of a loan. The receiver reads in place. It returns the loan when nothing refers to the payload::

    lender                                       borrower
    segment 3, its descriptor ─────────────────▶ maps it, read-only
                              ◀───────────────── attached 3
    chunk, by a stream: reference, loan 17 ────▶ payload is a view
                              ◀───────────────── returned 17

A payload that does not lie in a segment is copied into one, the *arena* of the channel. If the arena is
full, the payload goes over its stream as with every other carrier. So only a sender that wants to write the
memory again waits for a loan.

The node that opens a stream also connects the channel to which references of this stream belong, in
both directions. When the channel ends, so do its loans. A dead process reads no more; a live one
keeps its mapping, but must not trust a payload that it has not finished reading. Sizes and places that a
peer names are checked against the segment as it was mapped; the size of a segment is sealed.

Messages are packets (SOCK_SEQPACKET), so they need no framing; the packet that announces a segment brings
its descriptor.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from google.protobuf.message import DecodeError

from gradstream.errors import ConfigError
from gradstream.memory import Span
from gradstream.memory.segments import Segment
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Identity, Landing, Stream
from gradstream.transport.shm.leases import BorrowedLeases, GivenLeases, Loaned, ReferenceLostError
from gradstream.transport.socket.unix import check_peer, listen, recv_descriptors, send_descriptors
from gradstream.wire import v1
from gradstream.wire.frames import payload_tensor

_MAX_PACKET_BYTES = 16 << 10
_LATE_S = 0.5  # a reference that arrives this long after the end of its stream is no longer accepted
_HELLO_S = 10.0  # a connection that has sent nothing for this long is closed

K = TypeVar("K")

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)


class Channel:
    """One connection between two nodes, and the loans in both directions.

    Args:
        connection: connected non-blocking socket of kind SOCK_SEQPACKET to a process of the same user. The
            channel closes it.
        number: number of the channel, chosen by the node that connected.
        peer: name of the other node.
        on_close: called once the channel is over, for whatever reason.
    """

    def __init__(
        self,
        runtime: Runtime,
        connection: socket.socket,
        number: int,
        peer: str,
        on_close: Callable[[Channel], None],
    ) -> None:
        self.number = number
        self.closed = False
        self._runtime = runtime
        self._connection = connection
        self._peer = peer
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[bytes, Segment | None]] = deque()
        self._given = GivenLeases(runtime, number, self._post, self.close)
        self._borrowed = BorrowedLeases(number, self._post)
        self._closed_by_peer = select.poll()
        self._closed_by_peer.register(connection, select.POLLHUP)
        self._loop.add_reader(connection, self._readable)

    # ---- the streams' side ----------------------------------------------------------------

    def lend(self, stream: Stream, span: Span, end: Callable[[], None]) -> tuple[v1.Reference, Loaned] | None:
        """See `GivenLeases.lend`."""
        return None if self.closed else self._given.lend(stream, span, end)

    def stow(self, stream: Stream, payload: torch.Tensor) -> v1.Reference | None:
        """See `GivenLeases.stow`."""
        return None if self.closed else self._given.stow(stream, payload)

    def find(self, chunk: v1.Chunk, landing: Landing) -> tuple[torch.Tensor | None, bool]:
        """The payload to which a chunk refers, and whether it was copied to where the receiver wants it.

        The reference is removed from the chunk, so that the chunk can be forwarded.

        Args:
            chunk: a chunk with a reference.
            landing: names the memory into which the receiver wants the payload.

        Raises:
            ReferenceLostError: the memory can no longer be read.
            FrameError: the reference or the chunk breaks the protocol.
        """
        if self.closed:
            raise ReferenceLostError
        view = self._borrowed.find(chunk.reference)
        chunk.ClearField("reference")
        payload = payload_tensor(chunk, view)
        place = None if payload is None else landing(chunk)
        if place is None or payload is None or (len(place), place.dtype) != (len(payload), payload.dtype):
            return payload, False
        place.numpy()[...] = payload.numpy()  # on this thread alone
        if not self._intact():
            raise ReferenceLostError
        return place, True

    def _intact(self) -> bool:
        """Whether the bytes read are those that were lent: a peer closes its end before it reuses overdue memory."""
        return not self.closed and not self._closed_by_peer.poll(0)

    # ---- the socket -----------------------------------------------------------------------

    def _post(self, message: v1.Lending, segment: Segment | None = None) -> None:
        if self.closed:
            return
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append((message.SerializeToString(), segment))

    def _flush(self) -> None:
        while self._outbox and not self.closed:
            data, segment = self._outbox[0]
            try:
                if segment is None:
                    self._connection.send(data)
                else:
                    send_descriptors(self._connection, data, [segment.fd])
            except BlockingIOError:
                self._loop.add_writer(self._connection, self._writable)
                return
            except OSError:
                self.close("its process is gone")
                return
            self._outbox.popleft()

    def _writable(self) -> None:
        self._loop.remove_writer(self._connection)
        self._flush()

    def _readable(self) -> None:
        try:
            data, descriptors = recv_descriptors(self._connection, _MAX_PACKET_BYTES, 1)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(error.strerror or str(error))
            return
        if not data:
            self.close("its process is gone")
            return
        try:
            message = v1.Lending.FromString(data)
            if message.HasField("segment"):
                self._borrowed.map(message.segment, descriptors)
                return
        except (DecodeError, ConfigError) as error:
            self.close(f"it broke the protocol: {error}")
            return
        finally:
            for descriptor in descriptors:  # `map` did not keep these
                os.close(descriptor)
        self._take(message)

    def _take(self, message: v1.Lending) -> None:
        kind = message.WhichOneof("kind")
        if kind == "attached":
            self._given.attached(message.attached)
        elif kind == "dropped":
            self._borrowed.dropped(message.dropped)
        elif kind == "returned":
            self._given.returned(message.returned.ids)
        elif kind == "forgotten":
            # Some may still arrive over their stream, which is not synchronized with this channel.
            forget = partial(self._borrowed.forget, list(message.forgotten.ids))
            self._runtime.call_later(_LATE_S, forget)
        else:
            self.close(f"it broke the protocol: a message of kind {kind} where none may come")

    def close(self, reason: str) -> None:
        """Ends the channel and all loans, both ways. Idempotent."""
        if self.closed:
            return
        self.closed = True
        _log.debug("channel with %s: %s", self._peer, reason)
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()  # first: a reader of our memory can see this before anybody writes the memory
        self._outbox.clear()
        self._given.close()
        self._borrowed.close()  # views that are still referenced keep their memory mapped
        self._on_close(self)


class PayloadChannels:
    """All payload channels of an endpoint."""

    def __init__(self, runtime: Runtime, identity: Identity) -> None:
        self._runtime = runtime
        self._identity = identity
        self._listener: socket.socket | None = None
        self._outgoing: dict[str, Channel] = {}  # by peer
        self._incoming: dict[tuple[str, int], Channel] = {}  # by peer and incarnation
        self._strangers: dict[socket.socket, Callable[[], None]] = {}  # connected, but silent so far

    def start(self, address: str) -> None:
        """Lets peers connect that know the endpoint by `address`. Raises ConfigError if that is in use."""
        self._listener = listen(_name_of(address), socket.SOCK_SEQPACKET)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def towards(self, peer: str, address: str) -> Channel | None:
        """The channel for streams that this node opens to a peer; None if the peer is not on this host."""
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
        mine, number = self._identity, next(_numbers)
        hello = v1.Lending.Hello(job=mine.job, sender=mine.name, incarnation=mine.incarnation, channel=number)
        connection.send(v1.Lending(hello=hello).SerializeToString())
        channel = Channel(self._runtime, connection, number, peer, partial(_remove, self._outgoing, peer))
        self._outgoing[peer] = channel
        return channel

    def with_sender(self, sender: str, incarnation: int) -> Channel | None:
        """The channel for streams that a peer has opened."""
        return self._incoming.get((sender, incarnation))

    def disconnect(self, peer: str) -> None:
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
            self._reject(stranger)
        for channel in [*self._outgoing.values(), *self._incoming.values()]:
            channel.close(f"{self._identity.name} closes")

    # ---- incoming connections -------------------------------------------------------------

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
        timer = self._runtime.expire_after(_HELLO_S, partial(self._reject, connection))
        self._strangers[connection] = timer.cancel

    def _reject(self, connection: socket.socket) -> None:
        self._settle(connection)
        connection.close()

    def _settle(self, connection: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(connection)
        self._strangers.pop(connection)()

    def _greeted(self, connection: socket.socket) -> None:
        try:
            hello = v1.Lending.FromString(connection.recv(_MAX_PACKET_BYTES)).hello
        except BlockingIOError:
            return
        except (OSError, DecodeError):
            hello = v1.Lending.Hello()
        if not hello.sender or hello.job != self._identity.job:
            self._reject(connection)
            return
        self._settle(connection)
        key = (hello.sender, hello.incarnation)
        if key in self._incoming:
            self._incoming[key].close("it has connected again")
        over = partial(_remove, self._incoming, key)
        self._incoming[key] = Channel(self._runtime, connection, hello.channel, hello.sender, over)


def _remove(channels: dict[K, Channel], key: K, channel: Channel) -> None:
    if channels.get(key) is channel:
        del channels[key]


def _name_of(address: str) -> str:
    """The abstract name of the socket at which an endpoint accepts channels."""
    return f"\0gradstream/{address.strip(chr(0))}/memory"
