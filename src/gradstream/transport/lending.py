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
import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from google.protobuf.message import DecodeError

from gradstream.errors import ConfigError
from gradstream.memory import Span
from gradstream.runtime.base import Runtime
from gradstream.segments import Segment
from gradstream.transport.base import Identity
from gradstream.transport.mailbox import Seen
from gradstream.transport.shelf import Shelf
from gradstream.transport.stream import ReferenceLostError, StreamCore
from gradstream.transport.unix import check_peer, listen, recv_descriptors, send_descriptors
from gradstream.wire import v1
from gradstream.wire.frames import MAX_PAYLOAD_BYTES, FrameError

__all__ = ["LEAST_BYTES", "Channel", "Lending"]

LEAST_BYTES = 32 << 10
"""Smaller payloads go with their frame: that costs less than the loan."""

SHELF_BYTES = 32 << 20
MAX_SEGMENTS = 256  # of one peer, mapped at once
_MAX_PACKET_BYTES = 16 << 10
_IDS_PER_PACKET = 1000
_STRAGGLE_S = 0.5  # a reference that has not come so long after its stream was over is not taken any more
_HELLO_S = 10.0  # who connects and says nothing is sent away after this

K = TypeVar("K")
End = Callable[[], None]

_log = logging.getLogger(__name__)
_channels = itertools.count(1)


class Loaned:
    """A loan that was given; implements `transport.base.Lent`."""

    __slots__ = ("_channel", "_end", "_over")

    def __init__(self, channel: Channel, end: End) -> None:
        self._channel = channel
        self._end = end
        self._over = asyncio.Event()

    @property
    def returned(self) -> bool:
        """See `Lent.returned`."""
        return self._over.is_set()

    def close(self) -> None:
        """The borrower has let go of it, or is gone."""
        if not self.returned:
            self._over.set()
            self._end()

    async def back(self, patience_s: float) -> None:
        """See `Lent.back`."""
        if self.returned:
            return
        try:
            await self._channel.runtime.within(patience_s, self._over.wait())
        except TimeoutError:
            self._channel.close(f"it kept memory for {patience_s:g} s that is needed here")


class Channel:
    """One connection between two nodes: what each has lent to the other.

    Args:
        runtime: of this node.
        connection: connected, non-blocking, of kind SOCK_SEQPACKET, to a process of the same user; owned.
        number: of the channel, chosen by who has connected.
        peer: name of the other node.
        on_close: called once it is over, in whatever way.
    """

    def __init__(
        self,
        runtime: Runtime,
        connection: socket.socket,
        number: int,
        peer: str,
        on_close: Callable[[Channel], None],
    ) -> None:
        self.runtime = runtime
        self.number = number
        self.peer = peer
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._on_close = on_close
        self._outbox: deque[tuple[bytes, Segment | None]] = deque()
        # What we lend.
        self._shelf_segment: Segment | None = None
        self._shelf = Shelf(0, SHELF_BYTES)
        self._segments: dict[int, bool] = {}  # announced; whether the peer has mapped it
        self._given: dict[int, Loaned] = {}
        self._of_stream: dict[StreamCore, list[int]] = {}
        self._loans = itertools.count(1)
        # What we have borrowed.
        self._mapped: dict[int, Segment] = {}
        self._held: dict[int, weakref.ref[object]] = {}
        self._seen = Seen()  # loans that came, or never will
        self._released: deque[int] = deque()
        self._returning = False
        self._hung_up = select.poll()
        self._hung_up.register(connection, select.POLLHUP)
        self._loop.add_reader(connection, self._readable)

    # ---- lending --------------------------------------------------------------------------

    def lend(
        self, stream: StreamCore, span: Span, end: Callable[[], None]
    ) -> tuple[v1.Reference, Loaned] | None:
        """A reference to a span where it lies; None where that is not in a segment, or not known there yet.

        Args:
            stream: by which the reference goes; when that is over, loans that never got there end.
            end: called when the loan is over.
        """
        vector, itemsize = span.vector, span.vector.tensor.element_size()
        size_bytes = len(span) * itemsize
        if self.closed or not isinstance(vector.home, Segment) or not _lendable(size_bytes):
            return None
        if not self._known(vector.home):
            return None
        offset_bytes = vector.offset_bytes + span.start * itemsize
        return self._give(stream, vector.home, offset_bytes, size_bytes, end)

    def stow(self, stream: StreamCore, payload: torch.Tensor) -> v1.Reference | None:
        """A reference to a copy of the payload on the shelf; None where that has no room."""
        size_bytes = payload.nbytes
        if self.closed or not _lendable(size_bytes):
            return None
        segment = self._shelf_segment
        if segment is None:
            segment = self._shelf_segment = Segment.create(SHELF_BYTES, "gradstream shelf")
        offset = self._shelf.take(size_bytes) if self._known(segment) else None
        if offset is None:
            return None
        place = segment.tensor(offset, payload.numel(), payload.dtype)
        place.numpy()[...] = payload.detach().numpy()  # on this thread alone
        end = partial(self._shelf.give_back, offset, size_bytes)
        return self._give(stream, segment, offset, size_bytes, end)[0]

    def _give(
        self,
        stream: StreamCore,
        segment: Segment,
        offset_bytes: int,
        size_bytes: int,
        end: Callable[[], None],
    ) -> tuple[v1.Reference, Loaned]:
        loan = next(self._loans)
        loaned = self._given[loan] = Loaned(self, end)
        if stream not in self._of_stream:
            self._of_stream[stream] = []
            stream.on_release(partial(self._stream_over, stream))
        self._of_stream[stream].append(loan)
        reference = v1.Reference(
            channel=self.number,
            segment=segment.number,
            offset_bytes=offset_bytes,
            size_bytes=size_bytes,
            loan=loan,
        )
        return reference, loaned

    def _known(self, segment: Segment) -> bool:
        """Whether the peer has mapped it; at the first question it is told to."""
        if segment.number not in self._segments:
            self._segments[segment.number] = False
            weakref.finalize(segment, self._drop, segment.number).atexit = False
            self._post(v1.Lending(segment=segment.number), segment)
        return self._segments[segment.number]

    def _drop(self, number: int) -> None:
        # A segment goes with its vector, on whichever thread that happens.
        if not self.closed:
            with suppress(RuntimeError):  # the loop is over
                self._loop.call_soon_threadsafe(self._post, v1.Lending(dropped=number))

    def _stream_over(self, stream: StreamCore) -> None:
        """Frames that were dropped on their way never get there; the peer finds out which."""
        left = [loan for loan in self._of_stream.pop(stream) if loan in self._given]
        self._post_ids(left, lambda ids: v1.Lending(forgotten=ids))

    def _end(self, loans: Iterable[int]) -> None:
        for loan in loans:
            loaned = self._given.pop(loan, None)
            if loaned is not None:
                loaned.close()

    # ---- borrowing ------------------------------------------------------------------------

    def find(self, reference: v1.Reference) -> memoryview:
        """The bytes that a reference means, read-only. The loan is returned when nothing refers to them.

        Raises:
            ReferenceLostError: the channel is over, or the loan.
            FrameError: they lie in no segment that the peer has handed out.
        """
        if self.closed or reference.channel != self.number or not self._seen.add(reference.loan):
            raise ReferenceLostError
        segment, size_bytes = self._mapped.get(reference.segment), reference.size_bytes
        start_bytes, stop_bytes = reference.offset_bytes, reference.offset_bytes + size_bytes
        room_bytes = 0 if segment is None else segment.size_bytes
        if segment is None or not _lendable(size_bytes) or stop_bytes > room_bytes or start_bytes % 8:
            raise FrameError(
                f"a reference to bytes {start_bytes} to {stop_bytes} of shared memory {reference.segment}, "
                f"of which {room_bytes} bytes are mapped here: expected {LEAST_BYTES} to {MAX_PAYLOAD_BYTES} "
                "bytes within it"
            )
        view = np.frombuffer(segment.bytes[start_bytes:stop_bytes], dtype=np.uint8)
        self._held[reference.loan] = weakref.ref(view, partial(self._let_go, reference.loan))
        return memoryview(view)  # type: ignore[arg-type]

    def intact(self) -> bool:
        """Whether the peer has not hung up, as it does before it writes what was not returned in time."""
        return not self.closed and not any(self._hung_up.poll(0))

    def _let_go(self, loan: int, _: object = None) -> None:
        """Nothing refers to a payload any more; on whichever thread that was noticed."""
        self._released.append(loan)
        if not self._returning:
            self._returning = True
            with suppress(RuntimeError):  # the loop is over
                self._loop.call_soon_threadsafe(self._return)

    def _return(self) -> None:
        self._returning = False
        loans = []
        while self._released:
            loans.append(self._released.popleft())
        for loan in loans:
            self._held.pop(loan, None)
        self._post_ids(loans, lambda ids: v1.Lending(returned=ids))

    def _forget(self, loans: Iterable[int]) -> None:
        unseen = [loan for loan in loans if self._seen.add(loan)]
        self._post_ids(unseen, lambda ids: v1.Lending(returned=ids))

    def _map(self, number: int, descriptors: list[int]) -> None:
        if len(descriptors) != 1 or number in self._mapped or len(self._mapped) >= MAX_SEGMENTS:
            for descriptor in descriptors:
                os.close(descriptor)
            return  # never attached: its owner does without
        self._mapped[number] = Segment.attach(descriptors[0], writable=False)
        self._mapped[number].close()  # the mapping stays
        self._post(v1.Lending(attached=number))

    # ---- the socket -----------------------------------------------------------------------

    def _post_ids(self, ids: list[int], message: Callable[[v1.Lending.Loans], v1.Lending]) -> None:
        for start in range(0, len(ids), _IDS_PER_PACKET):
            self._post(message(v1.Lending.Loans(ids=ids[start : start + _IDS_PER_PACKET])))

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
            self._take(v1.Lending.FromString(data), descriptors)
        except (DecodeError, ConfigError, FrameError) as error:
            self.close(f"it broke the protocol: {error}")

    def _take(self, message: v1.Lending, descriptors: list[int]) -> None:
        kind = message.WhichOneof("kind")
        if kind == "segment":
            self._map(message.segment, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        if kind == "attached":
            if message.attached in self._segments:
                self._segments[message.attached] = True
        elif kind == "dropped":
            self._mapped.pop(message.dropped, None)
        elif kind == "returned":
            self._end(message.returned.ids)
        elif kind == "forgotten":
            # By their stream, which is not in step with this channel, some may still arrive.
            self.runtime.call_later(_STRAGGLE_S, partial(self._forget, list(message.forgotten.ids)))
        else:
            raise FrameError(f"a message of kind {kind} where none may come")

    def close(self, reason: str) -> None:
        """The channel is over, and with it all loans, both ways. Idempotent."""
        if self.closed:
            return
        self.closed = True
        _log.debug("channel with %s: %s", self.peer, reason)
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        self._outbox.clear()
        given, self._given = self._given, {}
        for loaned in given.values():
            loaned.close()
        self._mapped.clear()  # views that are still held keep their memory mapped
        self._shelf_segment = None
        self._on_close(self)


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
        timer = self._runtime.call_later(_HELLO_S, partial(self._send_away, connection))
        self._strangers[connection] = timer.cancel

    def _send_away(self, connection: socket.socket) -> None:
        self._part(connection)
        connection.close()

    def _part(self, connection: socket.socket) -> None:
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


def _lendable(size_bytes: int) -> bool:
    return LEAST_BYTES <= size_bytes <= MAX_PAYLOAD_BYTES
