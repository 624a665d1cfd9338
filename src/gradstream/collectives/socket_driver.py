"""Carries out one rank's plan over data sockets, without an event loop, on a thread of its own.

In each round the thread sends what may go, reads what has arrived, and adds up complete pieces. It sleeps in
the system's poll when there is nothing to do. So its time goes into the system's copies and into sums.

What two ranks send each other goes in pieces, each with a header. There may be several sockets between them. The first
piece of an operation leads: it always goes over the same one. Each other piece takes whichever has room, and its header
says where it belongs. A rank takes a piece only if the header says that it belongs to the same operation; sizes and
places come from the plan. On a socket that needs them, two checksums follow, of the piece and of the whole header:
nothing is added, sent on or called complete before they have passed.
"""

from __future__ import annotations

import select
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from typing_extensions import override

from gradstream.collectives.communicator import DataSocket
from gradstream.collectives.schedule import Operation, PlanProgress, Recv
from gradstream.errors import ConfigError, InternalError, PeerLostError
from gradstream.transport.socket.tls import has_more
from gradstream.wire.frames import CHECKSUM, DamagedError, checksum, verify

# ---- socket pieces -----------------------------------------------------------------------
# Pieces of an operation over data sockets: which are left to send to a peer, and which are due from it.

HEADER = struct.Struct("<QIIQ")
"""Number and digest of the operation, place of the piece among all that go the same way, bytes of the piece."""


class SocketTransfer:
    """What all directions of an operation have in common: its progress, and its memory as bytes and elements."""

    def __init__(self, progress: PlanProgress, operation: Operation, tensor: torch.Tensor) -> None:
        self.progress = progress
        self.operation = operation
        self.values = tensor.numpy()
        self.memory = memoryview(self.values).cast("B")  # type: ignore[arg-type]  # numpy's stubs lack Buffer

    def pieces(self, numbers: Sequence[int]) -> list[SocketPiece]:
        """The pieces of these steps, in order."""
        pieces = enumerate(self.progress.pieces(numbers))
        return [SocketPiece(place, step, start, stop) for place, (step, start, stop) in pieces]

    def is_free(self, piece: SocketPiece) -> bool:
        """Whether earlier steps are done with all of a piece: a part of it would cost a system call of its own."""
        return self.progress.limit(piece.step) >= piece.stop

    def finish(self, piece: SocketPiece) -> None:
        """Notes that a piece is done."""
        self.progress.finish(piece.step, piece.start, piece.stop)


class SocketPiece(NamedTuple):
    """[start, stop) bytes of the vector, of one step of the plan; `place` in the order of all that go the same way."""

    place: int
    step: int
    start: int
    stop: int


class LeftPieces:
    """The pieces that no socket to one peer has been given yet."""

    def __init__(self, transfer: SocketTransfer, numbers: Sequence[int]) -> None:
        self._transfer = transfer
        self._pieces = deque(transfer.pieces(numbers))

    def __len__(self) -> int:
        return len(self._pieces)

    def next(self, data_socket: DataSocket) -> SocketPiece | None:
        """Takes the next piece, if all of it may go now, and over this socket."""
        if not self._pieces or (self._pieces[0].place == 0 and not data_socket.leads):
            return None
        return self._pieces.popleft() if self._transfer.is_free(self._pieces[0]) else None


class DuePieces:
    """The pieces from one peer whose header has not come, over any of its sockets."""

    def __init__(self, transfer: SocketTransfer, numbers: Sequence[int], num_sockets: int) -> None:
        self.num_open = num_sockets  # over which some may still come
        self._operation = transfer.operation
        self._pieces = dict(enumerate(transfer.pieces(numbers)))

    def __len__(self) -> int:
        return len(self._pieces)

    def first(self) -> SocketPiece:
        """The first of them."""
        return next(iter(self._pieces.values()))

    def take(self, header: bytearray, data_socket: DataSocket) -> SocketPiece | None:
        """The piece that a header names; None if it belongs to a later operation, while others of this one are due.

        Raises:
            ConfigError: there is no such piece, or the peer carries out another operation.
        """
        operation = self._operation
        number, digest, place, num_bytes = HEADER.unpack(header)
        if (number, digest) == (operation.number, operation.digest):
            piece = self._pieces.pop(place, None)
            if piece is not None and piece.stop - piece.start == num_bytes:
                return piece
            raise ConfigError(
                f"{operation.text}: piece {place} of {num_bytes} bytes came from {data_socket.name}, where this rank "
                "expects none of them; all ranks must have the same version"
            )
        if data_socket.leads and 0 in self._pieces:  # the first piece would have come before
            raise operation.mismatch(data_socket.name, number)
        return None


# ---- socket driver -----------------------------------------------------------------------

PATIENCE_MS = 2
"""An operation that takes less never leaves the event loop: to wake a thread, and then the loop, would take as
long as the allreduce of a short vector."""

_HUNG_UP = select.POLLHUP | select.POLLERR | select.POLLNVAL


class SocketDriver:
    """One operation while it lasts; see `ScheduleDriver`.

    Args:
        progress: of this rank's plan, in bytes.
        operation: what the ranks do.
        tensor: (elems,), borrowed for writing.
        sockets: the sockets to each peer, by its number in the plan.
        in_thread: runs a blocking function on the thread of the sockets.
        now: clock of the node's runtime, in nanoseconds.
    """

    def __init__(
        self,
        progress: PlanProgress,
        operation: Operation,
        tensor: torch.Tensor,
        sockets: Mapping[int, Sequence[DataSocket]],
        in_thread: Callable[[Callable[[], object]], Awaitable[None]],
        now: Callable[[], int],
    ) -> None:
        self._in_thread = in_thread
        self._now = now
        self._text = operation.text
        transfer, plan = SocketTransfer(progress, operation, tensor), progress.plan
        self._readers: list[SocketReader] = []
        self._writers: list[SocketWriter] = []
        for peer, numbers in plan.recvs.items():
            due = DuePieces(transfer, numbers, len(sockets[peer]))
            self._readers += [SocketReader(transfer, due, socket) for socket in sockets[peer]]
        for peer, numbers in plan.sends.items():
            left = LeftPieces(transfer, numbers)
            self._writers += [SocketWriter(transfer, left, socket) for socket in sockets[peer]]

    async def run(self) -> None:
        """See `ScheduleDriver.run`. However this ends, nothing touches the operation's memory afterwards."""
        if not self.run_blocking(PATIENCE_MS):
            await self._in_thread(self.run_blocking)

    def run_blocking(self, patience_ms: int | None = None) -> bool:
        """Goes on until this rank has sent and received everything; blocks the calling thread.

        Args:
            patience_ms: time after which it returns, to be called again. None waits until the peers have
                come, or the sockets are shut down.

        Returns:
            Whether everything is done.

        Raises:
            PeerLostError, ConfigError: see `ScheduleDriver.run`.
        """
        until_ns = None if patience_ms is None else self._now() + patience_ms * 1_000_000
        poller = _Poller()
        while True:
            readers = [reader for reader in self._readers if not reader.is_done]
            writers = [writer for writer in self._writers if not writer.is_done]
            if not (readers or writers):
                return True
            if until_ns is not None and self._now() >= until_ns:
                return False
            sending = [writer for writer in writers if writer.clear and writer.can_move()]
            for writer in sending:
                writer.move()
            receiving = {reader.fd: reader for reader in readers if reader.can_move()}
            blocked = {writer.fd: writer for writer in writers if not writer.clear}
            if not (sending or receiving or blocked):
                raise InternalError(f"{self._text}: its steps wait for each other in a circle")
            for direction in poller.ready(receiving, blocked, 0 if sending else patience_ms):
                direction.move()


class _Poller:
    """Finds the sockets that can continue. Tells the system only what has changed since the last call."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._masks: dict[int, int] = {}

    def ready(
        self,
        readers: Mapping[int, SocketReader],
        writers: Mapping[int, SocketWriter],
        patience_ms: int | None,
    ) -> list[_Direction]:
        """Directions whose socket becomes ready within `patience_ms`, readers first. Keys are descriptors."""
        masks = dict.fromkeys(readers, select.POLLIN)
        for fd in writers:
            masks[fd] = masks.get(fd, 0) | select.POLLOUT
        for fd in self._masks.keys() - masks.keys():
            self._poll.unregister(fd)
        for fd, mask in masks.items():
            if self._masks.get(fd) != mask:
                self._poll.register(fd, mask)
        self._masks = masks
        more = {fd for fd, reader in readers.items() if reader.has_more()}
        ready = self._poll.poll(0 if more else patience_ms) if masks else []
        more |= {fd for fd, event in ready if event & (select.POLLIN | _HUNG_UP)}
        receiving = [reader for fd, reader in readers.items() if fd in more]
        sending = [
            writers[fd] for fd, event in ready if fd in writers and event & (select.POLLOUT | _HUNG_UP)
        ]
        return [*receiving, *sending]


class _Direction(ABC):
    """What goes to one peer, or comes from it, over one socket, one piece after the other.

    Attributes:
        fd: descriptor of the socket.
    """

    def __init__(self, transfer: SocketTransfer, data_socket: DataSocket) -> None:
        self.fd = data_socket.socket.fileno()
        self._transfer = transfer
        self._data_socket = data_socket
        self._piece: SocketPiece | None = None

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Nothing is left to do."""

    @abstractmethod
    def can_move(self) -> bool:
        """Whether earlier steps allow something to move now."""

    @abstractmethod
    def move(self) -> None:
        """Moves as much as one system call does, or a header and what comes with it.

        Raises:
            PeerLostError: the peer is gone, or has left.
            ConfigError: the peer carries out another operation.
        """

    def _lost(self, why: str) -> PeerLostError:
        text = f"left the group before {self._transfer.operation.text} was done ({why})"
        return PeerLostError(self._data_socket.name, text)


class SocketWriter(_Direction):
    """Sends to one peer.

    Attributes:
        clear: the socket has taken everything that it was given last.
    """

    clear = True

    def __init__(self, transfer: SocketTransfer, left: LeftPieces, data_socket: DataSocket) -> None:
        super().__init__(transfer, data_socket)
        self._left = left
        self._unsent: list[memoryview] = []  # header and piece

    @property
    @override
    def is_done(self) -> bool:
        return self._piece is None and not self._left

    def can_move(self) -> bool:
        """See `_Direction.can_move`: takes the next piece if it has none."""
        if self._piece is None and (piece := self._left.next(self._data_socket)) is not None:
            operation, data = self._transfer.operation, self._transfer.memory[piece.start : piece.stop]
            head = HEADER.pack(operation.number, operation.digest, piece.place, len(data))
            if self._data_socket.checked:
                head += _sum(data)
                head += _sum(head)
            self._piece, self._unsent = piece, [memoryview(head), data]
        return self._piece is not None

    @override
    def move(self) -> None:
        head, data = self._unsent
        try:
            sent = self._data_socket.socket.sendmsg(self._unsent)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error
        self.clear = sent == len(head) + len(data)
        self._unsent = [head[sent:], data[max(0, sent - len(head)) :]]
        if self.clear and self._piece is not None:
            self._transfer.finish(self._piece)
            self._piece = None


class SocketReader(_Direction):
    """Receives from one peer: into the vector itself, or into spare memory to be added piece by piece."""

    def __init__(self, transfer: SocketTransfer, due: DuePieces, data_socket: DataSocket) -> None:
        super().__init__(transfer, data_socket)
        self._due = due
        self._head_bytes = HEADER.size + 2 * CHECKSUM.size * data_socket.checked
        self._room = self._bytes = memoryview(b"")  # what is left of the place of a piece, and all of it
        self._is_over = False  # what comes belongs to a later operation, or nothing comes any more
        self._adds = False

    def has_more(self) -> bool:
        """Whether bytes may be here that the system no longer reports."""
        return has_more(self._data_socket.socket)

    @property
    @override
    def is_done(self) -> bool:
        return self._piece is None and (self._is_over or not self._due)

    @override
    def can_move(self) -> bool:
        return self._transfer.is_free(self._piece or self._due.first())

    @override
    def move(self) -> None:
        if self._piece is None and self._has_head():
            self._begin()
        if self._piece is None or not self.can_move():
            return
        came = self._received(self._room)
        if came == 0:
            raise self._lost("the connection was closed")
        if came is None:
            return
        self._room = self._room[came:]
        if not self._room:
            self._end(self._piece)

    def _received(self, room: memoryview) -> int | None:
        """Bytes that have come now: 0 if no more will, None if some may."""
        try:
            return self._data_socket.socket.recv_into(room)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error

    def _has_head(self) -> bool:
        """Whether the header is there, after one system call at most. It stays with the socket until it is used."""
        head = self._data_socket.head
        if len(head) < self._head_bytes:
            room = memoryview(bytearray(self._head_bytes - len(head)))
            if (came := self._received(room)) == 0:
                if head:
                    raise self._lost("the connection was closed")
                self._leave("the connection was closed")  # it may have sent the rest over others before
            head += room[: came or 0]
        return len(head) == self._head_bytes

    def _leave(self, why: str) -> None:
        """Nothing else of this operation comes over this socket, but over others. Raises if there are none."""
        self._is_over = True
        self._due.num_open -= 1
        if not self._due.num_open:
            raise self._lost(why)

    def _begin(self) -> None:
        """Finds out which piece comes, and where it belongs."""
        head = self._data_socket.head
        if self._data_socket.checked:
            self._verify(head[: -CHECKSUM.size], head[-CHECKSUM.size :])
        self._piece = piece = self._due.take(head[: HEADER.size], self._data_socket)
        if piece is None:
            self._leave("pieces are missing")
            return
        self._data_socket.head = bytearray()
        self._sum = head[HEADER.size : HEADER.size + CHECKSUM.size]
        step = self._transfer.progress.plan.steps[piece.step]
        self._adds = isinstance(step, Recv) and step.add
        if self._adds:
            self._part = self._data_socket.part(piece.stop - piece.start, self._transfer.values.dtype)
            self._bytes = memoryview(self._part).cast("B")  # type: ignore[arg-type]  # numpy's stubs lack Buffer
        else:
            self._bytes = self._transfer.memory[piece.start : piece.stop]
        self._room = self._bytes

    def _end(self, piece: SocketPiece) -> None:
        """Verifies the piece that has come, and adds it."""
        if self._data_socket.checked:
            self._verify(self._bytes, self._sum)
        if self._adds:
            unit = self._transfer.progress.unit
            target = self._transfer.values[piece.start // unit : piece.stop // unit]
            np.add(target, self._part, out=target)
        self._piece = None
        self._transfer.finish(piece)

    def _verify(self, data: bytearray | memoryview, expected: bytearray) -> None:
        try:
            verify(data, *CHECKSUM.unpack(expected))
        except DamagedError as error:
            self._data_socket.on_damage(error.size_bytes)
            text = f"{self._transfer.operation.text}: {error}"
            raise PeerLostError(self._data_socket.name, text) from None


def _sum(data: bytes | memoryview) -> bytes:
    return CHECKSUM.pack(checksum(data))
