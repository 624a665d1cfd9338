"""A connection: frames over one stream socket, TCP, TLS or Unix, both ways.

A header and its payload leave in one system call without being joined, and a payload is received
where the receiver wants it: neither side copies it. No system call moves more than `PIECE_BYTES`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gradstream.runtime.tasks import Broadcast
from gradstream.transport import proof
from gradstream.transport.base import Identity, refused_by
from gradstream.transport.limits import LIMITS
from gradstream.transport.socket import framing
from gradstream.transport.socket.framing import GREETING, PREFIX, FrameReader, OutgoingFrame, Receiver
from gradstream.transport.socket.tls import TlsSocket, has_more
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL, DamagedError, FrameError, decode, encode

# ---- connection --------------------------------------------------------------------------

_MAX_BUFFERS = 64  # of one system call


TcpSocket = socket.socket | TlsSocket


class Owner(Receiver, Protocol):
    """Receives the frames of a connection, and learns of its end."""

    def lost(self, connection: Connection, message: str) -> None:
        """Called when the connection is lost, and closed."""
        ...

    def damaged(self, size_bytes: int) -> None:
        """Called before `lost`, if bytes were damaged on their way."""
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
        self.socket: TcpSocket | None = None
        self._closed = False
        self._outbox: deque[OutgoingFrame] = deque()
        self._flushing = False  # whether a flush is due, or waits for the socket
        self._waits_writable = False
        self._reads_on = False  # whether `_read_on` is due
        self._emptied = Broadcast()

    @property
    def started(self) -> bool:
        """Whether it has, or had, a socket."""
        return self.socket is not None or self._closed

    def start(self, connected: TcpSocket, *, checked: bool) -> None:
        """Begins to read and write.

        Args:
            connected: connected, non-blocking; owned by this object from now on.
            checked: whether frames have checksums.
        """
        if self._closed:
            connected.close()
            return
        self.socket, self.reader.checked = connected, checked
        self._loop.add_reader(connected, self._readable)
        self._read_on_soon()
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
            if frame.stream == stream and frame.droppable:
                self.backlog_bytes -= frame.left_bytes
                frame.void()
                self.backlog_bytes += frame.left_bytes

    async def flushed(self) -> None:
        """Returns once all frames have left, or none will any more."""
        while self._outbox and not self._closed:
            await self._emptied.wait()

    def _flush_soon(self) -> None:
        if not self._flushing and self._outbox and self.socket is not None:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Makes one system call."""
        if self.socket is None or not self._outbox:
            self._stop_flushing()
            return
        buffers, size_bytes = self._gather()
        try:
            sent_bytes = self.socket.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            sent_bytes = 0
        except OSError:
            self._stop_writing()  # the reader still receives what has arrived, and then the end
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
            frame.droppable = False  # a socket with TLS must be given the same bytes again
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
        if wanted != self._waits_writable and self.socket is not None:
            self._waits_writable = wanted
            if wanted:
                self._loop.add_writer(self.socket, self._flush)
            else:
                self._loop.remove_writer(self.socket)

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

    def _read_on_soon(self) -> None:
        if not self._reads_on and self.socket is not None and has_more(self.socket):
            self._reads_on = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._reads_on = False
        if self.socket is not None:
            self._readable()

    def _readable(self) -> None:
        """Makes one system call."""
        assert self.socket is not None
        room = self.reader.room()
        try:
            num_bytes = (
                self.socket.recv_into(room[0]) if len(room) == 1 else self.socket.recvmsg_into(room)[0]
            )
            if num_bytes:
                self.reader.took(num_bytes)
                self._read_on_soon()
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
        if self.socket is not None:
            self._loop.remove_reader(self.socket)
        self._stop_writing()
        self._closed = True
        self.reader.close()
        if self.socket is not None:
            self.socket.close()
            self.socket = None


# ---- greeting ----------------------------------------------------------------------------
# The beginning of a connection over a socket: challenge, greeting and answer, before its first stream.
#
# `proof` describes their content. Both sides read exactly these frames and leave the next bytes in the socket.


async def greet(connected: TcpSocket, greeting: v1.Greeting, identity: Identity, called: str) -> None:
    """Greets as the caller. Returns once each side has proved to the other that it knows the secret.

    Args:
        connected: connected non-blocking socket.
        greeting: the greeting without its nonces and proof. Afterwards, `checked` says whether the connection
            has checksums.
        called: name of the node that the caller wants to reach.

    Raises:
        RefusedError: the called side refuses this node, or does not know the secret itself.
        FrameError: the program that answers is not a node of gradstream.
        OSError: the connection is lost.
    """
    challenge = await _read(connected, "challenge", "refuse")
    if challenge.HasField("refuse"):
        raise refused_by(called, challenge.refuse)
    proof.answer_challenge(identity, called, challenge.challenge, greeting)
    await _write(connected, v1.Frame(greeting=greeting))
    answer = await _read(connected, "proven", "refuse")
    if answer.HasField("refuse"):
        raise refused_by(called, answer.refuse)
    proof.check_called(identity, called, greeting, answer.proven)


Objection = Callable[[v1.Greeting], "v1.Refuse | None"]


async def answer(
    connected: TcpSocket, identity: Identity, objection: Objection, *, checked: bool = False
) -> v1.Greeting:
    """Answers as the called side. Returns the greeting of a caller that has proved knowledge of the secret.

    A caller without the secret learns nothing else.

    Args:
        connected: connected non-blocking socket.
        objection: says why this node refuses a caller that knows the secret; None if it accepts it.
        checked: whether this side wants checksums.

    Raises:
        RefusedError: the caller does not know the secret, or this node refuses it.
        FrameError: the caller is no node of gradstream.
        OSError: the connection is lost.
    """
    challenge = proof.new_nonce()
    asked = v1.Challenge(protocol=PROTOCOL, nonce=challenge, checked=checked)
    await _write(connected, v1.Frame(challenge=asked))
    greeting = (await _read(connected, "greeting")).greeting
    refuse = proof.objection(identity, challenge, greeting, checked=checked) or objection(greeting)
    if refuse is not None:
        await _write(connected, v1.Frame(refuse=refuse))
        raise refused_by(identity.name, refuse)
    shown = proof.called_proof(identity.secret, greeting, job=identity.job, called=identity.name)
    await _write(connected, v1.Frame(proven=v1.Proven(proof=shown)))
    return greeting


async def _write(connected: TcpSocket, frame: v1.Frame) -> None:
    header = encode(frame, seed=0)
    data = PREFIX.pack(GREETING, 0, len(header), 0) + header
    if isinstance(connected, TlsSocket):
        await connected.sendall(data)
    else:
        await asyncio.get_running_loop().sock_sendall(connected, data)


async def _read(connected: TcpSocket, kind: str, *others: str) -> v1.Frame:
    """Reads the next frame. Raises FrameError if it is of none of these kinds."""
    stream, _, header_bytes, payload_bytes = PREFIX.unpack(await _exactly(connected, PREFIX.size))
    if stream != GREETING or payload_bytes or header_bytes > LIMITS.greeting_bytes:
        raise FrameError(f"bytes that are no {kind}")
    frame, _ = decode(await _exactly(connected, header_bytes))
    if frame.WhichOneof("kind") not in (kind, *others):
        raise FrameError(f"a frame of kind {frame.WhichOneof('kind')}: expected {kind}")
    return frame


async def _exactly(connected: TcpSocket, num_bytes: int) -> bytes:
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < num_bytes:
        left_bytes = num_bytes - len(got)
        if isinstance(connected, TlsSocket):
            more = await connected.recv(left_bytes)
        else:
            more = await loop.sock_recv(connected, left_bytes)
        if not more:
            raise ConnectionResetError("the connection was closed")
        got += more
    return got
