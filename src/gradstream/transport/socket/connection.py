"""A connection: frames over one stream socket, TCP or Unix, both ways.

A header and its payload leave in one system call without being joined, and a payload is received
where the receiver wants it: neither side copies it. No system call moves more than `PIECE_BYTES`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Protocol

from gradstream.transport.silence import Broadcast
from gradstream.transport.socket import framing
from gradstream.transport.socket.framing import FrameReader, OutgoingFrame, Receiver
from gradstream.wire.frames import DamagedError, FrameError

_MAX_BUFFERS = 64  # of one system call


class Owner(Receiver, Protocol):
    """Receives the frames of a connection, and learns of its end."""

    def lost(self, connection: Connection, message: str) -> None:
        """Called when the connection is lost, and closed."""
        ...

    def damaged(self, size_bytes: int) -> None:
        """Called before `lost`, where bytes were damaged on their way."""
        ...


class Connection:
    """One socket, read and written by the event loop.

    Frames can be posted before there is a socket; `start` sends them.

    Args:
        owner: receives the frames, and learns of the end.
    """

    def __init__(self, owner: Owner) -> None:
        self.reader = FrameReader(owner)
        self.backlog_bytes = 0  # of frames that the system has not taken over
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._closed = False
        self._outbox: deque[OutgoingFrame] = deque()
        self._flushing = False  # a flush is due, or waits for the socket
        self._waits_writable = False
        self._emptied = Broadcast()

    @property
    def started(self) -> bool:
        """Whether it has, or had, a socket."""
        return self._socket is not None or self._closed

    def start(self, connected: socket.socket, *, checked: bool) -> None:
        """Begins to read and write.

        Args:
            connected: connected, non-blocking, and owned from here on.
            checked: frames have checksums.
        """
        if self._closed:
            connected.close()
            return
        self._socket, self.reader.checked = connected, checked
        self._loop.add_reader(connected, self._readable)
        self._flush_soon()

    # ---- writing ------------------------------------------------------------------------

    def post(self, frame: OutgoingFrame) -> None:
        """Sends a frame after those posted before it. Frames of one iteration of the loop leave together."""
        if self._closed:
            frame.on_sent(frame)
            return
        self._outbox.append(frame)
        self.backlog_bytes += frame.left_bytes
        self._flush_soon()

    def drop(self, stream: int) -> None:
        """Empties queued chunks and bodies of a stream. The frames stay: no number may be missing."""
        for frame in self._outbox:
            if frame.stream == stream and frame.droppable and not frame.sent_bytes:
                self.backlog_bytes -= frame.left_bytes
                frame.void()
                self.backlog_bytes += frame.left_bytes

    async def flushed(self) -> None:
        """Returns once all frames have left, or none will any more."""
        while self._outbox and not self._closed:
            await self._emptied.wait()

    def _flush_soon(self) -> None:
        if not self._flushing and self._outbox and self._socket is not None:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Makes one system call."""
        if self._socket is None or not self._outbox:
            self._stop_flushing()
            return
        buffers, size_bytes = self._gather()
        try:
            sent_bytes = self._socket.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            sent_bytes = 0
        except OSError:
            self._stop_writing()  # the reader still receives what had arrived, and then the end
            return
        self._advance(sent_bytes)
        if not self._outbox:
            self._stop_flushing()
        elif sent_bytes < size_bytes:
            self._await_writable(True)
        elif not self._waits_writable:
            self._loop.call_soon(self._flush)

    def _gather(self) -> tuple[list[bytes | memoryview], int]:
        buffers: list[bytes | memoryview] = []
        size_bytes = 0
        for frame in self._outbox:
            if self.reader.checked:
                self.backlog_bytes += frame.seal()
            pieces = frame.pieces(framing.PIECE_BYTES - size_bytes)
            buffers += pieces
            size_bytes += sum(map(len, pieces))
            if size_bytes >= framing.PIECE_BYTES or len(buffers) >= _MAX_BUFFERS:
                break
        return buffers, size_bytes

    def _advance(self, sent_bytes: int) -> None:
        self.backlog_bytes -= sent_bytes
        while sent_bytes:
            frame = self._outbox[0]
            step_bytes = min(sent_bytes, frame.left_bytes)
            frame.sent_bytes += step_bytes
            sent_bytes -= step_bytes
            if not frame.left_bytes:
                self._outbox.popleft()
                frame.on_sent(frame)

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
            frame = self._outbox.popleft()
            frame.on_sent(frame)
        self._stop_flushing()

    def _stop_flushing(self) -> None:
        self._flushing = False
        self._await_writable(False)
        self._emptied.ring()

    # ---- reading ------------------------------------------------------------------------

    def _readable(self) -> None:
        """Makes one system call."""
        assert self._socket is not None
        room = self.reader.room()
        try:
            num_bytes = (
                self._socket.recv_into(room[0]) if len(room) == 1 else self._socket.recvmsg_into(room)[0]
            )
            if num_bytes:
                self.reader.took(num_bytes)
            else:
                self.fail("the connection was closed")
        except (BlockingIOError, InterruptedError):
            pass
        except FrameError as error:
            if isinstance(error, DamagedError):
                self._owner.damaged(error.size_bytes)
            self.fail(f"it sent {error}")
        except OSError as error:
            self.fail(f"the connection was lost ({error.strerror or error})")

    # ---- the end ------------------------------------------------------------------------

    def fail(self, message: str) -> None:
        """Closes the connection, and tells the owner why."""
        if not self._closed:
            self.close()
            self._owner.lost(self, message)

    def close(self) -> None:
        """Closes the socket at once, and releases the memory of payloads. Idempotent."""
        if self._closed:
            return
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
        self._stop_writing()
        self._closed = True
        self.reader.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
