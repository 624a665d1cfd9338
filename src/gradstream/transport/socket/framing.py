"""Frames as bytes on a socket: `OutgoingFrame` writes them, `FrameReader` reads them.

A frame is a prefix of four numbers, its header and its payload::

    [ stream, number, header bytes, payload bytes: 4 x u32 ] [ v1.Frame, no payload ] [ elements ]

On a connection that needs them, three checksums (3 x u64) follow the four numbers: of the payload, of the header, and
of everything before them. So a damaged length is noticed before anything waits for as many bytes, and a damaged
header before anything is done with it.

Lengths come first, so that a payload can be received straight into the place that its receiver
names. Nothing in this module waits, or uses a socket.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from google.protobuf.message import DecodeError

from gradstream.wire import v1
from gradstream.wire.frames import MAX_HEADER_BYTES, FrameError, checksum, verify

GREETING = 0
"""The stream number of the frames that begin a connection and name the caller (see `greeting`)."""

PIECE_BYTES = 256 << 10
"""Most bytes of one system call: between two calls, the event loop runs other callbacks."""

MAX_SKIP_BYTES = 64 << 20  # a payload up to this length is skipped if a stream rejects it

PREFIX = struct.Struct("<4I")
_SUMS = struct.Struct("<2Q")  # of payload and header
_PREFIX_SUM = struct.Struct("<Q")
_SUMMED_BYTES = PREFIX.size + _SUMS.size
_SEALED_BYTES = _SUMMED_BYTES + _PREFIX_SUM.size
_BUFFER_BYTES = 16 << 10  # small: the part of a payload that is read together with its header is copied
_WASTE = memoryview(bytearray(PIECE_BYTES))  # receives payloads that are skipped


class PayloadPlace(NamedTuple):
    """Where a payload is received.

    Args:
        memory: contiguous, of exactly the payload's length.
        landed: whether `memory` is the destination that the stream's user named with `Stream.land`; otherwise it was
            allocated for this payload.
    """

    memory: torch.Tensor
    landed: bool


class Receiver(Protocol):
    """Takes the frames that arrive."""

    def place(self, stream: int, frame: v1.Frame, payload_bytes: int) -> PayloadPlace | None:
        """Where to put the payload that follows this header; None skips the frame and its payload."""
        ...

    def arrived(self, stream: int, number: int, frame: v1.Frame, place: PayloadPlace | None) -> None:
        """Takes a frame whose payload is in its place."""
        ...


class OutgoingFrame:
    """A frame that is being sent.

    Args:
        stream, number: number of the stream, and of the frame in the order of this stream.
        frame: the header; copied here, so the caller may change it.
        payload: sent in place: it must not change before `on_sent` or `own` has been called.
        on_sent: called when the system has taken over the whole frame, or no longer can.
    """

    __slots__ = ("_sealed", "droppable", "head", "number", "on_sent", "payload", "sent_bytes", "stream")

    def __init__(
        self,
        stream: int,
        number: int,
        frame: v1.Frame,
        payload: memoryview | None = None,
        *,
        on_sent: Callable[[OutgoingFrame], None],
    ) -> None:
        self.stream = stream
        self.number = number
        self.payload = payload
        self.on_sent = on_sent
        self.sent_bytes = 0
        self.droppable = frame.HasField("chunk") or frame.HasField("body")
        self.head = self._head(frame)

    def _head(self, frame: v1.Frame) -> bytes:
        self._sealed = False
        header = frame.SerializeToString()
        payload_bytes = 0 if self.payload is None else self.payload.nbytes
        return PREFIX.pack(self.stream, self.number, len(header), payload_bytes) + header

    @property
    def left_bytes(self) -> int:
        """Bytes that the system has not taken over yet."""
        return len(self.head) + (0 if self.payload is None else self.payload.nbytes) - self.sent_bytes

    def pieces(self, room_bytes: int) -> list[bytes | memoryview]:
        """The buffers left to send, not joined, with at most `room_bytes` of payload."""
        at, head_bytes = self.sent_bytes, len(self.head)
        pieces: list[bytes | memoryview] = []
        if at < head_bytes:
            pieces.append(self.head[at:])
            at = head_bytes
        if self.payload is not None:
            start = at - head_bytes
            pieces.append(self.payload[start : start + room_bytes])
        return pieces

    def seal(self) -> int:
        """Adds checksums, unless it has them, and returns by how many bytes the frame has grown."""
        if self._sealed:
            return 0
        self._sealed = True
        prefix, header = self.head[: PREFIX.size], self.head[PREFIX.size :]
        prefix += _SUMS.pack(checksum(self.payload or b""), checksum(header))
        self.head = prefix + _PREFIX_SUM.pack(checksum(prefix)) + header
        return _SEALED_BYTES - PREFIX.size

    def own(self) -> None:
        """Copies the payload, so that its memory may be written again."""
        if self.payload is not None:
            self.payload = memoryview(bytes(self.payload))

    def void(self) -> None:
        """Makes the frame empty; its number stays in use. Only for a frame of which nothing was sent."""
        self.payload, self.droppable = None, False
        self.head = self._head(v1.Frame(credit=v1.Credit()))


class _Incoming:
    """A frame that is being read."""

    __slots__ = ("frame", "header_bytes", "number", "payload_bytes", "place", "stream", "sums")

    def __init__(self, prefix: memoryview, *, checked: bool) -> None:
        self.sums: tuple[int, int] | None = None  # of payload and header
        if checked:
            verify(prefix[:_SUMMED_BYTES], *_PREFIX_SUM.unpack_from(prefix, _SUMMED_BYTES))
            self.sums = _SUMS.unpack_from(prefix, PREFIX.size)
        self.stream, self.number, self.header_bytes, self.payload_bytes = PREFIX.unpack_from(prefix)
        self.frame: v1.Frame | None = None
        self.place: PayloadPlace | None = None
        for what, got, most in (
            ("header", self.header_bytes, MAX_HEADER_BYTES),
            ("payload", self.payload_bytes, MAX_SKIP_BYTES),
        ):
            if got > most:
                raise FrameError(f"a frame of {got} bytes of {what}: expected at most {most}")


class FrameReader:
    """Turns bytes read from a socket into frames.

    Read into `room()`, then call `took` with the number of bytes.

    Args:
        receiver: takes the frames; may be replaced at any time.

    Attributes:
        checked: whether the frames have checksums. Set it before the first byte.
    """

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.checked = False
        self._closed = False
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # of the unparsed bytes in the buffer
        self._incoming: _Incoming | None = None
        self._big_header: bytearray | None = None
        self._filling = memoryview(b"")  # the rest of the memory that is being filled
        self._skip_bytes = 0  # of a skipped payload, after `_filling`

    def room(self) -> list[memoryview]:
        """The buffers to read into. The end of a payload and the next frame can come together."""
        if not self._filling:
            return [self._view[self._end :]]
        piece = self._filling[:PIECE_BYTES]
        last = len(piece) == len(self._filling) and not self._skip_bytes
        return [piece, self._view] if last else [piece]

    def took(self, num_bytes: int) -> None:
        """Takes `num_bytes` that were read into the room, and hands complete frames to the receiver.

        Raises:
            DamagedError: a checksum is wrong. The connection cannot be used any more.
            FrameError: the bytes are not frames. The connection cannot be used any more.
        """
        filled_bytes = min(num_bytes, len(self._filling), PIECE_BYTES)
        self._filling = self._filling[filled_bytes:]
        self._end += num_bytes - filled_bytes
        if filled_bytes and not self._filling:
            self._filled()
        self._parse()

    def abandon(self, stream: int) -> None:
        """Skips the rest of a payload of this stream that is being received."""
        incoming = self._incoming
        if incoming is not None and incoming.stream == stream and incoming.place is not None:
            incoming.place = None
            self._skip(len(self._filling))

    def close(self) -> None:
        """Hands out nothing more, and releases all memory."""
        self._closed = True
        self._incoming, self._filling = None, memoryview(b"")

    # ---- inside -------------------------------------------------------------------------

    def _parse(self) -> None:
        """Parses the buffer until a payload has begun or more bytes are needed."""
        prefix_bytes = _SEALED_BYTES if self.checked else PREFIX.size
        while not self._filling and not self._closed:
            left_bytes = self._end - self._start
            if self._incoming is None:
                if left_bytes < prefix_bytes:
                    break
                self._incoming = _Incoming(self._view[self._start : self._end], checked=self.checked)
                self._start += prefix_bytes
            elif left_bytes >= self._incoming.header_bytes:
                start = self._start
                self._start += self._incoming.header_bytes
                self._headed(self._incoming, bytes(self._view[start : self._start]))
            elif self._incoming.header_bytes <= _BUFFER_BYTES:
                break
            else:
                self._big_header = bytearray(self._incoming.header_bytes)
                self._fill(memoryview(self._big_header))
        self._compact()

    def _compact(self) -> None:
        left_bytes = self._end - self._start
        if self._start and left_bytes:
            self._view[:left_bytes] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, left_bytes

    def _headed(self, incoming: _Incoming, header: bytes) -> None:
        """Takes a complete header; its payload follows, if there is one."""
        if incoming.sums is not None:
            verify(header, incoming.sums[1])
        try:
            incoming.frame = v1.Frame.FromString(header)
        except DecodeError as error:
            raise FrameError(f"{len(header)} bytes that are no gradstream.v1.Frame: {error}") from None
        if not incoming.payload_bytes:
            self._deliver(incoming)
            return
        place = self.receiver.place(incoming.stream, incoming.frame, incoming.payload_bytes)
        if place is None:
            self._skip(incoming.payload_bytes)
            return
        assert place.memory.nbytes == incoming.payload_bytes
        incoming.place = place
        self._fill(_bytes_of(place))

    def _fill(self, memory: memoryview) -> None:
        """Directs the next bytes into `memory`; some of them may be in the buffer already."""
        here_bytes = min(self._end - self._start, len(memory))
        memory[:here_bytes] = self._view[self._start : self._start + here_bytes]
        self._start += here_bytes
        self._filling = memory[here_bytes:]
        if not self._filling:
            self._filled()

    def _skip(self, num_bytes: int) -> None:
        piece_bytes = min(num_bytes, len(_WASTE))
        self._skip_bytes = num_bytes - piece_bytes
        self._fill(_WASTE[:piece_bytes])

    def _filled(self) -> None:
        if self._skip_bytes:
            self._skip(self._skip_bytes)
            return
        assert self._incoming is not None
        if self._big_header is not None:
            header, self._big_header = bytes(self._big_header), None
            self._headed(self._incoming, header)
        else:
            self._deliver(self._incoming)

    def _deliver(self, incoming: _Incoming) -> None:
        self._incoming = None
        if incoming.payload_bytes and incoming.place is None:
            return  # skipped
        assert incoming.frame is not None
        if incoming.sums is not None and incoming.place is not None:
            verify(_bytes_of(incoming.place), incoming.sums[0])
        self.receiver.arrived(incoming.stream, incoming.number, incoming.frame, incoming.place)


def _bytes_of(place: PayloadPlace) -> memoryview:
    return memoryview(place.memory.numpy()).cast("B")  # type: ignore[arg-type]
