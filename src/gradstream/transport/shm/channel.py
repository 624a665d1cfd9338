"""A channel: the Unix socket over which two nodes hand each other memory, beside their streams.

Messages are packets (SOCK_SEQPACKET), so there is nothing to frame; that of a new segment brings its
descriptor. See `lending` for what is said.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from google.protobuf.message import DecodeError

from gradstream.errors import ConfigError
from gradstream.memory import Span
from gradstream.memory.segments import Segment
from gradstream.runtime.base import Runtime
from gradstream.transport.carrier import ReferenceLostError
from gradstream.transport.shm.leases import BorrowedLeases, GivenLeases, Loaned
from gradstream.transport.socket.unix import recv_descriptors, send_descriptors
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1

__all__ = ["MAX_PACKET_BYTES", "Channel"]

MAX_PACKET_BYTES = 16 << 10
_STRAGGLE_S = 0.5  # a reference that has not come so long after its stream was over is not taken any more

_log = logging.getLogger(__name__)


class Channel:
    """One connection between two nodes, and what each has lent to the other; a `PayloadChannel` of their streams.

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
        self._hung_up = select.poll()
        self._hung_up.register(connection, select.POLLHUP)
        self._loop.add_reader(connection, self._readable)

    # ---- a depot of streams ---------------------------------------------------------------

    def lend(
        self, stream: StreamCore, span: Span, end: Callable[[], None]
    ) -> tuple[v1.Reference, Loaned] | None:
        """See `PayloadChannel.lend`."""
        return None if self.closed else self._given.lend(stream, span, end)

    def stow(self, stream: StreamCore, payload: torch.Tensor) -> v1.Reference | None:
        """See `PayloadChannel.stow`."""
        return None if self.closed else self._given.stow(stream, payload)

    def find(self, reference: v1.Reference) -> memoryview:
        """See `PayloadChannel.find`."""
        if self.closed:
            raise ReferenceLostError
        return self._borrowed.find(reference)

    def intact(self) -> bool:
        """See `PayloadChannel.intact`. A peer hangs up before it writes what was not returned in time."""
        return not self.closed and not self._hung_up.poll(0)

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
            data, descriptors = recv_descriptors(self._connection, MAX_PACKET_BYTES, 1)
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
            for descriptor in descriptors:  # those that were not taken
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
            # By their stream, which is not in step with this channel, some may still arrive.
            forget = partial(self._borrowed.forget, list(message.forgotten.ids))
            self._runtime.call_later(_STRAGGLE_S, forget)
        else:
            self.close(f"it broke the protocol: a message of kind {kind} where none may come")

    def close(self, reason: str) -> None:
        """The channel is over, and with it all loans, both ways. Idempotent."""
        if self.closed:
            return
        self.closed = True
        _log.debug("channel with %s: %s", self._peer, reason)
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()  # first: whoever reads our memory can see it before anybody writes that
        self._outbox.clear()
        self._given.close()
        self._borrowed.close()  # views that are still held keep their memory mapped
        self._on_close(self)
