"""The `Multiplexer`: all streams that one node has opened to another, over one connection or several.

The frames of a stream are numbered. If there are several connections, a chunk takes the one with the
shortest queue, and the receiving side restores the order; all other frames take the first connection.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from gradstream.errors import RefusedError
from gradstream.runtime.base import Runtime
from gradstream.runtime.tasks import Broadcast
from gradstream.transport.base import SendHandle, bytes_of, refusal_of
from gradstream.transport.socket.connection import Connection
from gradstream.transport.socket.framing import GREETING, OutgoingFrame, PayloadPlace
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.frames import FrameError, check_chunk, from_wire, payload_tensor

Answer = Callable[["Multiplexer", "MultiplexedCarrier", v1.Open], StreamCore]
"""Answers an Open of the peer with a stream."""

PATIENCE_S = 0.02
"""A payload that the peer does not take in this time is copied: its owner may need the memory."""

AHEAD = 1
"""Payloads of a stream that may be queued while the next one is prepared."""

MAX_EARLY = 4096
"""Frames of a stream that may arrive before one of lower number."""


class SocketSendHandle:
    """The memory of a payload that is sent in place; implements `transport.base.SendHandle`.

    Args:
        frame: the frame that the payload belongs to.
    """

    def __init__(self, runtime: Runtime, frame: OutgoingFrame) -> None:
        self.returned = False
        self._runtime = runtime
        self._frame = frame
        self._callbacks: list[Callable[[], None]] = []
        self._changed = Broadcast()

    def then(self, callback: Callable[[], None]) -> None:
        """See `SendHandle.then`."""
        if self.returned:
            callback()
        else:
            self._callbacks.append(callback)

    async def back(self, patience_s: float) -> None:
        """See `Lent.back`: copies what has not left in time, even if this call is cancelled."""
        if self.returned:
            return
        timer = self._runtime.call_later(min(patience_s, PATIENCE_S), self.own)
        try:
            while not self.returned:
                await self._changed.wait()
        finally:
            timer.cancel()
            self.own()

    def own(self) -> None:
        """Copies what has not left, and returns the memory to its owner."""
        if not self.returned:
            self._frame.own()
            self.give_back()

    def give_back(self) -> None:
        """Returns the memory to its owner: the frame no longer needs it."""
        self.returned = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        self._changed.ring()


class MultiplexedCarrier:
    """The carrier of one stream; implements `transport.base.Carrier`.

    Args:
        multiplexer: carries the stream.
        number: number of the stream on this multiplexer.
    """

    def __init__(self, multiplexer: Multiplexer, number: int, runtime: Runtime) -> None:
        self.stream: StreamCore | None = None
        self.number = number
        self._multiplexer = multiplexer
        self._runtime = runtime
        self._is_over = False
        self._num_sent = self._num_arrived = 0
        self._early: dict[int, tuple[v1.Frame, PayloadPlace | None]] = {}
        self._queued = 0  # frames that have not left
        self._handles: dict[OutgoingFrame, SocketSendHandle] = {}  # of the queued frames that have a payload
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
        view = bytes_of(payload)
        outgoing = OutgoingFrame(self.number, self._num_sent, frame, view, on_sent=self._sent)
        self._num_sent += 1
        self._queued += 1
        handle = None
        if view is not None:
            handle = self._handles[outgoing] = SocketSendHandle(self._runtime, outgoing)
        self._multiplexer.post(outgoing)
        return handle

    def _sent(self, outgoing: OutgoingFrame) -> None:
        self._queued -= 1
        handle = self._handles.pop(outgoing, None)
        if handle is not None and not handle.returned:
            handle.give_back()
        self._left.ring()

    async def drained(self) -> None:
        """See `Carrier.drained`. One payload may still be queued while the next one is prepared."""
        while self._queued - min(AHEAD, len(self._handles)) > 0 and not self._is_over:
            await self._left.wait()

    def drop(self) -> None:
        """See `Carrier.drop`."""
        self._multiplexer.drop(self.number)

    def over(self) -> None:
        """See `Carrier.over`; frames that were transmitted still leave."""
        self._is_over = True
        for handle in self._handles.values():
            handle.own()
        self._left.ring()
        self._early.clear()
        self._multiplexer.forget(self.number)

    # ---- in -----------------------------------------------------------------------------

    def place(self, frame: v1.Frame, payload_bytes: int) -> PayloadPlace | None:
        """The place for a payload: memory that the stream's user has named, or new memory."""
        stream = self.stream
        if stream is None or self._is_over:
            return None
        try:
            if not frame.HasField("chunk"):
                raise FrameError(f"a payload with a frame of kind {frame.WhichOneof('kind')}")
            check_chunk(frame.chunk, payload_bytes)
            # The stream does not count chunks that arrived too early.
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
        """Counts the peer's Open, the first of its frames."""
        self._num_arrived = 1

    def arrived(self, number: int, frame: v1.Frame, place: PayloadPlace | None) -> None:
        """Takes a frame; frames before it may not have arrived yet."""
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
        """Hands the next frame in order to the stream."""
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
    """All streams of one priority that one node has opened to another.

    Args:
        peer: name of the other node.
        num_connections: number of sockets.
        answer: answers each Open; None if this node is the caller.
        on_lost: called when the multiplexer ends because a connection was lost.
        on_damage: called with the peer and a number of bytes that were damaged on their way.
    """

    def __init__(
        self,
        runtime: Runtime,
        peer: str,
        num_connections: int,
        *,
        answer: Answer | None = None,
        on_lost: Callable[[Multiplexer], None],
        on_damage: Callable[[str, int], None],
    ) -> None:
        self.peer = peer
        self.incarnation = 0  # of the peer, if the peer is the caller
        self.connections = [Connection(self) for _ in range(num_connections)]
        self.over = False
        self.made_ns = runtime.now()
        self._runtime = runtime
        self._answer = answer
        self._on_lost = on_lost
        self._on_damage = on_damage
        self._numbers = itertools.count(GREETING + 1)
        self._streams: dict[int, MultiplexedCarrier] = {}

    def carrier(self) -> MultiplexedCarrier:
        """Makes the carrier of a stream that is about to be opened."""
        return self._add(next(self._numbers))

    def _add(self, number: int) -> MultiplexedCarrier:
        carrier = self._streams[number] = MultiplexedCarrier(self, number, self._runtime)
        return carrier

    def post(self, frame: OutgoingFrame) -> None:
        """Sends a frame; a frame with a payload takes the connection with the shortest queue."""
        connection = self.connections[0]
        if frame.payload is not None and len(self.connections) > 1:
            connection = min(self.connections, key=lambda connection: connection.backlog_bytes)
        connection.post(frame)

    def drop(self, number: int) -> None:
        """Drops chunks and bodies of a stream that have not left."""
        for connection in self.connections:
            connection.drop(number)

    def forget(self, number: int) -> None:
        """Forgets a stream that is over: its late frames are skipped."""
        self._streams.pop(number, None)
        for connection in self.connections:
            connection.reader.abandon(number)

    # ---- the connections' side ----------------------------------------------------------

    def place(self, stream: int, frame: v1.Frame, payload_bytes: int) -> PayloadPlace | None:
        """See `Receiver.place`."""
        carrier = self._streams.get(stream)
        return None if carrier is None else carrier.place(frame, payload_bytes)

    def arrived(self, stream: int, number: int, frame: v1.Frame, place: PayloadPlace | None) -> None:
        """See `Receiver.arrived`."""
        carrier = self._streams.get(stream)
        if carrier is not None:
            carrier.arrived(number, frame, place)
        elif self._answer is not None and stream != GREETING and frame.HasField("open"):
            carrier = self._add(stream)
            carrier.opened()
            carrier.stream = self._answer(self, carrier, frame.open)

    def turned_away(self, error: RefusedError) -> None:
        """Refuses all streams: the called side refused this node, or is the wrong node."""
        refuse = refusal_of(error)
        for carrier in list(self._streams.values()):
            if carrier.stream is not None:
                carrier.stream.arrived(v1.Frame(refuse=refuse), None)
        self.fail(f"it has refused the connection: {error.reason}")

    def lost(self, connection: Connection, message: str) -> None:
        """See `Owner.lost`: if one connection is lost, the multiplexer ends."""
        del connection
        self.fail(message)

    def damaged(self, size_bytes: int) -> None:
        """See `Owner.damaged`."""
        self._on_damage(self.peer, size_bytes)

    def fail(self, message: str, *, nobody_listens: bool = False) -> None:
        """Closes the connections and breaks the streams."""
        if self.over:
            return
        self.close()
        for carrier in list(self._streams.values()):
            if carrier.stream is not None:
                carrier.stream.broken(message, nobody_listens=nobody_listens)
        self._streams.clear()
        self._on_lost(self)

    def close(self) -> None:
        """Closes the connections without a message to the streams."""
        self.over = True
        for connection in self.connections:
            connection.close()


def _fits(memory: torch.Tensor, elems: int, dtype: torch.dtype | None) -> bool:
    return memory.numel() == elems and memory.dtype == dtype and memory.is_contiguous()
