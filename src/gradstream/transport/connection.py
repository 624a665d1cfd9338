"""A connection: frames and their payloads over one stream socket, TCP or Unix.

A frame on the wire is a prefix of five numbers, its header and its payload::

    [ stream, number, header bytes, payload bytes, descriptors ] [ v1.Frame, no payload ] [ elements ]

They leave in one system call without being joined, and a payload is received into the place that
the receiver names, so that neither side copies it. No system call moves more than `PIECE_BYTES`:
between two of them everybody else on the event loop has a turn. Over Unix sockets a frame may bring
descriptors of open files.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from google.protobuf.message import DecodeError

from gradstream.transport.stream import Bell
from gradstream.wire import v1
from gradstream.wire.frames import FrameError

__all__ = ["MAX_HEADER_BYTES", "PIECE_BYTES", "Connection", "Parcel", "Place", "Receiver"]

PIECE_BYTES = 256 << 10
MAX_HEADER_BYTES = 5 << 20
MAX_SKIP_BYTES = 64 << 20  # a payload longer than a chunk's is not for us; one beyond this is no frame's
MAX_DESCRIPTORS = 16  # with one frame

_PREFIX = struct.Struct("<5I")
_INBOX_BYTES = 16 << 10  # small: what is read of a payload along with its header is copied
_MAX_BUFFERS = 64
_DESCRIPTORS_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
_WASTE = memoryview(bytearray(PIECE_BYTES))  # where payloads go that nobody wants


class Place(NamedTuple):
    """Where a payload is received.

    Args:
        memory: of exactly as many bytes, contiguous.
        landed: whether it is the stream's user who named it.
    """

    memory: torch.Tensor
    landed: bool


class Receiver(Protocol):
    """What a connection tells what it reads."""

    def place(self, stream: int, frame: v1.Frame, payload_bytes: int) -> Place | None:
        """Where to put the payload that follows this header; None skips it, and the frame with it."""
        ...

    def arrived(
        self, stream: int, number: int, frame: v1.Frame, place: Place | None, descriptors: Sequence[int]
    ) -> None:
        """A frame is here. Its descriptors are the receiver's to close."""
        ...

    def lost(self, connection: Connection, message: str) -> None:
        """The connection is gone, and closed."""
        ...


class Parcel:
    """A frame on its way out.

    Args:
        stream, number: its stream, and its place in the order of that stream's frames.
        frame: its header; may change afterwards.
        payload: stays where it is until `on_sent`, or until `own`.
        descriptors: to send along; the caller's to close, after `on_sent`.
        on_sent: called once the system has taken all of it over, or nobody will any more.
    """

    __slots__ = ("descriptors", "droppable", "head", "number", "on_sent", "payload", "sent_bytes", "stream")

    def __init__(
        self,
        stream: int,
        number: int,
        frame: v1.Frame,
        payload: memoryview | None = None,
        descriptors: Sequence[int] = (),
        *,
        on_sent: Callable[[Parcel], None],
    ) -> None:
        self.stream = stream
        self.number = number
        self.payload = payload
        self.descriptors = descriptors
        self.on_sent = on_sent
        self.sent_bytes = 0
        self.droppable = frame.HasField("chunk") or frame.HasField("body")
        self._pack(frame)

    def _pack(self, frame: v1.Frame) -> None:
        header = frame.SerializeToString()
        payload_bytes = 0 if self.payload is None else self.payload.nbytes
        count = len(self.descriptors)
        self.head = _PREFIX.pack(self.stream, self.number, len(header), payload_bytes, count) + header

    @property
    def left_bytes(self) -> int:
        """What has not been taken over yet."""
        return len(self.head) + (0 if self.payload is None else self.payload.nbytes) - self.sent_bytes

    def pieces(self, room_bytes: int) -> list[bytes | memoryview]:
        """What is left, without joining it, up to so many bytes of payload."""
        skip, head_bytes = self.sent_bytes, len(self.head)
        pieces: list[bytes | memoryview] = []
        if skip < head_bytes:
            pieces.append(self.head if not skip else self.head[skip:])
            skip = head_bytes
        if self.payload is not None:
            start = skip - head_bytes
            pieces.append(self.payload[start : start + room_bytes])
        return pieces

    def own(self) -> None:
        """Copies the payload, so that its memory may be written again."""
        if self.payload is not None:
            self.payload = memoryview(bytes(self.payload))

    def void(self) -> None:
        """Makes it say nothing, where nothing of it has left; its number is still used up."""
        self.payload, self.descriptors, self.droppable = None, (), False
        self._pack(v1.Frame(credit=v1.Credit()))


class _Incoming:
    """A frame that is being read."""

    __slots__ = ("descriptors", "frame", "header_bytes", "number", "payload_bytes", "place", "stream")

    def __init__(self, prefix: bytearray, at: int) -> None:
        numbers = _PREFIX.unpack_from(prefix, at)
        self.stream, self.number, self.header_bytes, self.payload_bytes, self.descriptors = numbers
        self.frame: v1.Frame | None = None
        self.place: Place | None = None


class Connection:
    """One socket, read and written by the event loop.

    Frames can be posted before there is a socket; `start` sends them.

    Args:
        receiver: is told of frames; may be exchanged for another at any time.
    """

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.max_header_bytes = MAX_HEADER_BYTES
        self.backlog_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._passes_descriptors = False
        self._closed = False
        self._outbox: deque[Parcel] = deque()
        self._flushing = False  # a flush is due, or waits for the socket
        self._waits_writable = False
        self._emptied = Bell()
        self._inbox = bytearray(_INBOX_BYTES)
        self._view = memoryview(self._inbox)
        self._start = self._end = 0  # of what was read into the inbox and not looked at
        self._incoming: _Incoming | None = None
        self._big_header: bytearray | None = None
        self._filling = memoryview(b"")  # what is left of the memory that is being filled
        self._skip_bytes = 0  # of a payload that goes to waste
        self._descriptors: deque[int] = deque()

    def start(self, connected: socket.socket) -> None:
        """Begins to read and write. The socket is connected, non-blocking, and owned from here on."""
        if self._closed:
            connected.close()
            return
        self._socket = connected
        self._passes_descriptors = connected.family == socket.AF_UNIX
        self._loop.add_reader(connected, self._readable)
        self._flush_soon()

    @property
    def started(self) -> bool:
        """Whether it has, or had, a socket."""
        return self._socket is not None or self._closed

    # ---- writing ------------------------------------------------------------------------

    def greet(self, parcel: Parcel) -> None:
        """Sends a frame before all others. The connection has not started yet."""
        if not self._closed:
            self._outbox.appendleft(parcel)
            self.backlog_bytes += parcel.left_bytes

    def inherit(self, before: Connection) -> None:
        """Sends what was posted to a connection that never started."""
        while before._outbox:
            self.post(before._outbox.popleft())

    def post(self, parcel: Parcel) -> None:
        """Sends a frame behind those posted before it. Frames of one turn of the loop leave together."""
        if self._closed:
            parcel.on_sent(parcel)
            return
        self._outbox.append(parcel)
        self.backlog_bytes += parcel.left_bytes
        self._flush_soon()

    def drop(self, stream: int, *, numbered: bool) -> None:
        """Forgets chunks and bodies of a stream of which nothing has left yet.

        Args:
            numbered: who receives counts them, so something has to come in their place.
        """
        for parcel in [p for p in self._outbox if p.stream == stream and p.droppable and not p.sent_bytes]:
            self.backlog_bytes -= parcel.left_bytes
            if numbered:
                parcel.void()
                self.backlog_bytes += parcel.left_bytes
            else:
                self._outbox.remove(parcel)
                parcel.on_sent(parcel)

    async def flushed(self) -> None:
        """Returns once everything posted has left, or nothing will any more."""
        while self._outbox and not self._closed:
            await self._emptied.wait()

    def _flush_soon(self) -> None:
        if not self._flushing and self._outbox and self._socket is not None:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """One system call's worth."""
        if self._socket is None or not self._outbox:
            self._rest()
            return
        buffers, size_bytes, descriptors = self._gather()
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        try:
            sent_bytes = self._socket.sendmsg(buffers, rights)
        except (BlockingIOError, InterruptedError):
            sent_bytes = 0
        except OSError:
            self._stop_writing()  # what had arrived before can still be read, and then the end
            return
        self._advance(sent_bytes)
        if not self._outbox:
            self._rest()
        elif sent_bytes < size_bytes:
            self._await_writable(True)
        elif not self._waits_writable:
            self._loop.call_soon(self._flush)

    def _rest(self) -> None:
        self._flushing = False
        self._await_writable(False)
        self._emptied.ring()

    def _gather(self) -> tuple[list[bytes | memoryview], int, Sequence[int]]:
        buffers: list[bytes | memoryview] = []
        descriptors: Sequence[int] = ()
        size_bytes = 0
        for parcel in self._outbox:
            if parcel.descriptors and not parcel.sent_bytes:
                if buffers:
                    break  # they come with the first byte of a system call
                descriptors = parcel.descriptors
            pieces = parcel.pieces(PIECE_BYTES - size_bytes)
            buffers += pieces
            size_bytes += sum(map(len, pieces))
            if size_bytes >= PIECE_BYTES or len(buffers) >= _MAX_BUFFERS:
                break
        return buffers, size_bytes, descriptors

    def _advance(self, sent_bytes: int) -> None:
        self.backlog_bytes -= sent_bytes
        while sent_bytes:
            parcel = self._outbox[0]
            step_bytes = min(sent_bytes, parcel.left_bytes)
            parcel.sent_bytes += step_bytes
            sent_bytes -= step_bytes
            if not parcel.left_bytes:
                self._outbox.popleft()
                parcel.on_sent(parcel)

    def _await_writable(self, wanted: bool) -> None:
        if wanted != self._waits_writable and self._socket is not None:
            self._waits_writable = wanted
            if wanted:
                self._loop.add_writer(self._socket, self._flush)
            else:
                self._loop.remove_writer(self._socket)

    def _stop_writing(self) -> None:
        self.backlog_bytes = 0
        while self._outbox:
            parcel = self._outbox.popleft()
            parcel.on_sent(parcel)
        self._rest()

    # ---- reading ------------------------------------------------------------------------

    def abandon(self, stream: int) -> None:
        """A payload of this stream that is being received goes to waste from here on."""
        incoming = self._incoming
        if incoming is not None and incoming.stream == stream and incoming.place is not None:
            incoming.place = None
            self._skip(len(self._filling))

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            self._read(self._socket)
        except (BlockingIOError, InterruptedError):
            pass
        except FrameError as error:
            self.fail(f"it sent {error}")
        except OSError as error:
            self.fail(f"the connection was lost ({error.strerror or error})")

    def _read(self, source: socket.socket) -> None:
        """One system call's worth. The end of a payload and what follows it come together."""
        if self._filling:
            wanted = self._filling[:PIECE_BYTES]
            last = len(wanted) == len(self._filling) and not self._skip_bytes
            buffers = [wanted, self._view] if last else [wanted]
        else:
            wanted = self._filling
            buffers = [self._view[self._end :]]
        if self._passes_descriptors:
            read_bytes, rights, _, _ = source.recvmsg_into(
                buffers, _DESCRIPTORS_BYTES, socket.MSG_CMSG_CLOEXEC
            )
            self._take_descriptors(rights)
        elif len(buffers) == 1:
            read_bytes = source.recv_into(buffers[0])
        else:
            read_bytes = source.recvmsg_into(buffers)[0]
        if not read_bytes:
            self.fail("the connection was closed")
            return
        filled_bytes = min(read_bytes, len(wanted))
        self._filling = self._filling[filled_bytes:]
        self._end += read_bytes - filled_bytes
        if filled_bytes and not self._filling:
            self._filled()
        self._parse()

    def _take_descriptors(self, rights: Sequence[tuple[int, int, bytes]]) -> None:
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                held = array.array("i")
                held.frombytes(data[: len(data) - len(data) % held.itemsize])
                self._descriptors.extend(held)

    def _parse(self) -> None:
        """Looks at what is in the inbox, until a payload is under way or more is needed."""
        while not self._filling and not self._closed:
            left_bytes = self._end - self._start
            if self._incoming is None:
                if left_bytes < _PREFIX.size:
                    break
                self._incoming = _Incoming(self._inbox, self._start)
                self._start += _PREFIX.size
                self._check(self._incoming)
            elif left_bytes >= self._incoming.header_bytes:
                start = self._start
                self._start += self._incoming.header_bytes
                self._headed(self._incoming, self._view[start : self._start])
            elif self._incoming.header_bytes <= _INBOX_BYTES:
                break
            else:
                self._big_header = bytearray(self._incoming.header_bytes)
                self._fill(memoryview(self._big_header))
        self._compact()

    def _check(self, incoming: _Incoming) -> None:
        bounds = (
            ("header bytes", incoming.header_bytes, self.max_header_bytes),
            ("payload bytes", incoming.payload_bytes, MAX_SKIP_BYTES),
            ("descriptors", incoming.descriptors, MAX_DESCRIPTORS if self._passes_descriptors else 0),
        )
        for what, got, most in bounds:
            if got > most:
                raise FrameError(f"a frame of {got} {what}: expected at most {most}")

    def _compact(self) -> None:
        left_bytes = self._end - self._start
        if self._start and left_bytes:
            self._view[:left_bytes] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, left_bytes

    def _headed(self, incoming: _Incoming, header: memoryview | bytearray) -> None:
        """A header is here; its payload follows, if there is one."""
        try:
            incoming.frame = v1.Frame.FromString(bytes(header))
        except DecodeError as error:
            raise FrameError(f"{len(header)} bytes that are no gradstream.v1.Frame: {error}") from None
        if not incoming.payload_bytes:
            self._deliver(incoming)
            return
        place = self.receiver.place(incoming.stream, incoming.frame, incoming.payload_bytes)
        if place is None:
            self._skip(incoming.payload_bytes)
        elif place.memory.nbytes != incoming.payload_bytes:
            raise FrameError(f"{incoming.payload_bytes} bytes for a place of {place.memory.nbytes}")
        else:
            incoming.place = place
            self._fill(memoryview(place.memory.numpy()).cast("B"))  # type: ignore[arg-type]

    def _fill(self, memory: memoryview) -> None:
        """What comes next belongs there; some of it may be here already."""
        here_bytes = min(self._end - self._start, len(memory))
        memory[:here_bytes] = self._view[self._start : self._start + here_bytes]
        self._start += here_bytes
        self._filling = memory[here_bytes:]
        if not self._filling:
            self._filled()

    def _skip(self, size_bytes: int) -> None:
        piece_bytes = min(size_bytes, len(_WASTE))
        self._skip_bytes = size_bytes - piece_bytes
        self._fill(_WASTE[:piece_bytes])

    def _filled(self) -> None:
        if self._skip_bytes:
            self._skip(self._skip_bytes)
            return
        assert self._incoming is not None
        if self._big_header is not None:
            header, self._big_header = self._big_header, None
            self._headed(self._incoming, header)
        else:
            self._deliver(self._incoming)

    def _deliver(self, incoming: _Incoming) -> None:
        self._incoming = None
        count = incoming.descriptors
        if len(self._descriptors) < count:
            raise FrameError(f"a frame that promises {count} descriptors without them")
        descriptors = [self._descriptors.popleft() for _ in range(count)]
        if incoming.place is None and incoming.payload_bytes:  # skipped
            _close_all(descriptors)
            return
        assert incoming.frame is not None
        self.receiver.arrived(incoming.stream, incoming.number, incoming.frame, incoming.place, descriptors)

    # ---- the end ------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self._closed

    def fail(self, message: str) -> None:
        """Closes, and tells the receiver why."""
        if not self._closed:
            self.close()
            self.receiver.lost(self, message)

    def close(self) -> None:
        """Closes the socket at once. Memory of payloads is free from here on. Idempotent."""
        if self._closed:
            return
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
        self._stop_writing()
        self._closed = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._incoming, self._filling = None, memoryview(b"")
        _close_all(self._descriptors)
        self._descriptors.clear()


def _close_all(descriptors: Sequence[int] | deque[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
