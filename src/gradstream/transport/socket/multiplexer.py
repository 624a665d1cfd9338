"""A link: the streams that one node has opened to another, over one connection or several.

Frames of a stream are numbered. Over several connections its chunks take the one with the least to
do, and the receiving side puts them in order again; everything else takes the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gradstream.errors import RefusedError
from gradstream.runtime.base import Runtime
from gradstream.transport.carrier import SendHandle
from gradstream.transport.silence import Broadcast
from gradstream.transport.socket.connection import Connection
from gradstream.transport.socket.framing import GREETING, OutgoingFrame, PayloadPlace
from gradstream.transport.socket.posted import PostedPayload
from gradstream.transport.stream import StreamCore, refusal_of
from gradstream.wire import v1
from gradstream.wire.dtypes import from_wire
from gradstream.wire.frames import FrameError, check_chunk, payload_tensor

if TYPE_CHECKING:
    from gradstream.transport.socket.endpoint import SocketEndpoint

__all__ = ["MultiplexedCarrier", "Multiplexer", "bytes_of"]

AHEAD = 1
"""Payloads of a stream that may wait behind one another."""

MAX_EARLY = 4096
"""Frames of a stream that may be here before one of lower number."""


class MultiplexedCarrier:
    """One stream's place on a link; implements `transport.stream.Carrier`.

    Args:
        link: what it is on.
        number: the stream's, on this link.
        runtime: of this node.
    """

    def __init__(self, link: Multiplexer, number: int, runtime: Runtime) -> None:
        self.stream: StreamCore | None = None
        self.number = number
        self._link = link
        self._runtime = runtime
        self._is_over = False
        self._num_sent = self._num_arrived = 0
        self._early: dict[int, tuple[v1.Frame, PayloadPlace | None]] = {}
        self._queued = 0  # parcels that have not left
        self._lent: dict[OutgoingFrame, PostedPayload] = {}  # those of them that have a payload
        self._left = Broadcast()

    # ---- out ----------------------------------------------------------------------------

    def connect(self, stream: StreamCore, opened: v1.Open) -> None:
        """See `OutgoingCarrier.connect`."""
        self.stream = stream
        self.transmit(v1.Frame(open=opened), None)

    def transmit(self, frame: v1.Frame, payload: torch.Tensor | None) -> SendHandle | None:
        """See `Carrier.transmit`."""
        if self._is_over:
            return None
        view = None if payload is None else bytes_of(payload)
        parcel = OutgoingFrame(self.number, self._num_sent, frame, view, on_sent=self._sent)
        self._num_sent += 1
        self._queued += 1
        posted = None
        if view is not None:
            posted = self._lent[parcel] = PostedPayload(self._runtime, parcel)
        self._link.post(parcel)
        return posted

    def _sent(self, parcel: OutgoingFrame) -> None:
        self._queued -= 1
        posted = self._lent.pop(parcel, None)
        if posted is not None and not posted.returned:
            posted.come_back()
        self._left.ring()

    async def drained(self) -> None:
        """See `Carrier.drained`. One payload may be on its way out while the next one is prepared."""
        while self._queued - min(AHEAD, len(self._lent)) > 0 and not self._is_over:
            await self._left.wait()

    def drop(self) -> None:
        """See `Carrier.drop`."""
        self._link.drop(self.number)

    def over(self) -> None:
        """See `Carrier.over`; what was transmitted still goes out."""
        self._is_over = True
        for posted in self._lent.values():
            posted.own()
        self._left.ring()
        self._early.clear()
        self._link.forget(self.number)

    # ---- in -----------------------------------------------------------------------------

    def place(self, frame: v1.Frame, payload_bytes: int) -> PayloadPlace | None:
        """Where a payload goes: where the stream's user wants it, else into new memory."""
        stream = self.stream
        if stream is None or self._is_over:
            return None
        try:
            if not frame.HasField("chunk"):
                raise FrameError(f"a payload with a frame of kind {frame.WhichOneof('kind')}")
            check_chunk(frame.chunk, payload_bytes)
            # Those that are here too early have not been counted yet.
            early = sum(place is not None for _, place in self._early.values())
            if not stream.may_bring(early + 1):
                raise FrameError(f"chunk {frame.chunk.index} without credit")
        except FrameError as error:
            stream.reject(error)
            return None
        chunk, dtype = frame.chunk, from_wire(frame.chunk.dtype)
        memory = stream.landing(chunk)
        if memory is not None and _fits(memory, chunk.elems, dtype):
            return PayloadPlace(memory, landed=True)
        if not stream.has_room(payload_bytes):
            return None
        return PayloadPlace(torch.empty(chunk.elems, dtype=dtype), landed=False)

    def opened(self) -> None:
        """The peer's Open, the first of its frames, was here."""
        self._num_arrived = 1

    def arrived(self, number: int, frame: v1.Frame, place: PayloadPlace | None) -> None:
        """A frame is here; those before it may not be."""
        if number != self._num_arrived or self._early:
            if number < self._num_arrived or number in self._early or len(self._early) >= MAX_EARLY:
                self._reject(FrameError(f"frame {number} where frame {self._num_arrived} is due"))
                return
            self._early[number] = (frame, place)
            while not self._is_over and self._num_arrived in self._early:
                self._num_arrived += 1
                self._feed(*self._early.pop(self._num_arrived - 1))
            return
        self._num_arrived += 1
        self._feed(frame, place)

    def _feed(self, frame: v1.Frame, place: PayloadPlace | None) -> None:
        """Hands a frame, in its order, to the stream."""
        if self.stream is None:
            return
        payload = None if place is None else place.memory
        try:
            if place is None and frame.HasField("chunk"):
                payload = payload_tensor(frame.chunk, None)
        except FrameError as error:
            self._reject(error)
            return
        self.stream.arrived(frame, payload, landed=place is not None and place.landed)

    def _reject(self, error: FrameError) -> None:
        if self.stream is not None:
            self.stream.reject(error)


class Multiplexer:
    """All streams that one node has opened to one other, of one priority.

    Args:
        endpoint: this node's.
        peer: the other's name.
        num_connections: over how many sockets.
        called: whether the peer has opened it.
        on_lost: called when it is over because a connection is.
    """

    def __init__(
        self,
        endpoint: SocketEndpoint,
        peer: str,
        num_connections: int,
        *,
        called: bool,
        on_lost: Callable[[Multiplexer], None],
    ) -> None:
        self.peer = peer
        self.incarnation = 0  # of the peer, where it is the caller
        self.connections = [Connection(self) for _ in range(num_connections)]
        self.over = False
        self._endpoint = endpoint
        self._called = called
        self._on_lost = on_lost
        self._numbers = itertools.count(GREETING + 1)
        self._streams: dict[int, MultiplexedCarrier] = {}

    def carrier(self) -> MultiplexedCarrier:
        """Of a stream that is about to be opened."""
        return self._add(next(self._numbers))

    def _add(self, number: int) -> MultiplexedCarrier:
        carrier = self._streams[number] = MultiplexedCarrier(self, number, self._endpoint.runtime)
        return carrier

    def _answer(self, number: int, opened: v1.Open) -> None:
        """The peer has opened a stream."""
        carrier = self._add(number)
        carrier.opened()
        carrier.stream = self._endpoint.answer(self, carrier, opened)

    def post(self, parcel: OutgoingFrame) -> None:
        """Sends a frame: a payload by the connection that has the least to do."""
        connection = self.connections[0]
        if parcel.payload is not None and len(self.connections) > 1:
            connection = min(self.connections, key=lambda one: one.backlog_bytes)
        connection.post(parcel)

    def drop(self, number: int) -> None:
        """Forgets chunks and bodies of a stream that have not left."""
        for connection in self.connections:
            connection.drop(number)

    def forget(self, number: int) -> None:
        """A stream is over: what still comes of it goes to waste."""
        self._streams.pop(number, None)
        for connection in self.connections:
            connection.inbox.abandon(number)

    # ---- what connections tell ----------------------------------------------------------

    def place(self, stream: int, frame: v1.Frame, payload_bytes: int) -> PayloadPlace | None:
        """See `Receiver.place`."""
        carrier = self._streams.get(stream)
        return None if carrier is None else carrier.place(frame, payload_bytes)

    def arrived(self, stream: int, number: int, frame: v1.Frame, place: PayloadPlace | None) -> None:
        """See `Receiver.arrived`."""
        carrier = self._streams.get(stream)
        if carrier is not None:
            carrier.arrived(number, frame, place)
        elif self._called and stream != GREETING and frame.HasField("open"):
            self._answer(stream, frame.open)

    def turned_away(self, error: RefusedError) -> None:
        """The called side does not want this node, or is not the one that was meant."""
        refuse = refusal_of(error)
        for carrier in list(self._streams.values()):
            if carrier.stream is not None:
                carrier.stream.arrived(v1.Frame(refuse=refuse), None)
        self.fail(f"it has refused the connection: {error.reason}")

    def lost(self, connection: Connection, message: str) -> None:
        """See `Owner.lost`: one connection is gone, so all of the link is."""
        del connection
        self.fail(message)

    def fail(self, message: str) -> None:
        """Ends the link and breaks its streams."""
        if self.over:
            return
        self.close()
        for carrier in list(self._streams.values()):
            if carrier.stream is not None:
                carrier.stream.broken(message)
        self._streams.clear()
        self._on_lost(self)

    def close(self) -> None:
        """Closes the connections, and tells nobody."""
        self.over = True
        for connection in self.connections:
            connection.close()


def bytes_of(payload: torch.Tensor) -> memoryview | None:
    """A tensor's memory as bytes; None where it has none."""
    if not payload.numel():
        return None
    return memoryview(payload.detach().numpy()).cast("B")  # type: ignore[arg-type]


def _fits(memory: torch.Tensor, elems: int, dtype: torch.dtype | None) -> bool:
    return memory.numel() == elems and memory.dtype == dtype and memory.is_contiguous()
