"""Carries out one rank's plan over data sockets, without an event loop, on a thread of its own.

In each round the thread sends what may go, reads what has arrived, and adds up complete pieces. It sleeps in
the system's poll when there is nothing to do. So its time goes into the system's copies and into sums.

A message is a header and the bytes of one step. A rank takes a message only if the header says that it belongs
to the same operation; sizes and places come from the plan. On a socket that needs them, a checksum follows the header,
and another one comes before each piece: nothing is added, sent on or called complete before it has passed.
"""

from __future__ import annotations

import select
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np
import torch

from gradstream.collectives.data_sockets import DataSocket
from gradstream.collectives.plan import Operation, PlanProgress
from gradstream.collectives.schedule import Recv
from gradstream.errors import ConfigError, InternalError, PeerLostError
from gradstream.wire.checksum import CHECKSUM, checksum
from gradstream.wire.frames import DamagedError, verify

PATIENCE_MS = 2
"""An operation that takes less never leaves the event loop: to wake a thread, and then the loop, would take as
long as the allreduce of a short vector."""

_HEADER = struct.Struct("<QIIQ")
"""Number and digest of the operation, index of the message between the two ranks, bytes of its payload."""

_HUNG_UP = select.POLLHUP | select.POLLERR | select.POLLNVAL


class SocketDriver:
    """One operation while it lasts; see `ScheduleDriver`.

    Args:
        progress: of this rank's plan, in bytes.
        operation: what the ranks do.
        tensor: (elems,), borrowed for writing.
        sockets: the socket to each peer, by its number in the plan.
        in_thread: runs a blocking function on the thread of the sockets.
        now: clock of the node's runtime, in nanoseconds.
    """

    def __init__(
        self,
        progress: PlanProgress,
        operation: Operation,
        tensor: torch.Tensor,
        sockets: Mapping[int, DataSocket],
        in_thread: Callable[[Callable[[], object]], Awaitable[None]],
        now: Callable[[], int],
    ) -> None:
        self._in_thread = in_thread
        self._now = now
        self._text = operation.text
        transfer, plan = _Transfer(progress, operation, tensor), progress.plan
        self._readers = [SocketReader(transfer, own, sockets[peer]) for peer, own in plan.recvs.items()]
        self._writers = [SocketWriter(transfer, own, sockets[peer]) for peer, own in plan.sends.items()]

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
        readers, writers, poller = self._readers, self._writers, _Poller()
        while readers or writers:
            if until_ns is not None and self._now() >= until_ns:
                return False
            sending = [writer for writer in writers if writer.clear and writer.room_bytes()]
            for writer in sending:
                writer.move()
            receiving = {reader.fd: reader for reader in readers if reader.room_bytes()}
            blocked = {writer.fd: writer for writer in writers if not writer.clear}
            if not (sending or receiving or blocked):
                raise InternalError(f"{self._text}: its steps wait for each other in a circle")
            for direction in poller.ready(receiving, blocked, 0 if sending else patience_ms):
                direction.move()
            readers = [reader for reader in readers if not reader.is_done]
            writers = [writer for writer in writers if not writer.is_done]
        return True


class _Poller:
    """Finds the sockets that can go on. Tells the system only what has changed since the last call."""

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
        found = self._poll.poll(patience_ms) if masks else []
        receiving = [
            readers[fd] for fd, event in found if fd in readers and event & (select.POLLIN | _HUNG_UP)
        ]
        sending = [
            writers[fd] for fd, event in found if fd in writers and event & (select.POLLOUT | _HUNG_UP)
        ]
        return [*receiving, *sending]


class _Transfer:
    """What all directions of an operation have in common: its progress, and its memory as bytes and elements."""

    def __init__(self, progress: PlanProgress, operation: Operation, tensor: torch.Tensor) -> None:
        self.progress = progress
        self.steps = progress.plan.steps
        self.operation = operation
        self.values = tensor.numpy()
        self.memory = memoryview(self.values).cast("B")  # type: ignore[arg-type]  # numpy's stubs lack Buffer

    def header(self, index: int, num_bytes: int) -> bytes:
        return _HEADER.pack(self.operation.number, self.operation.digest, index, num_bytes)


class _Direction(ABC):
    """What goes to one peer, or comes from it, one message after the other.

    Args:
        transfer: the operation.
        numbers: the steps with that peer in this direction, in order.
        data_socket: the socket to the peer.

    Attributes:
        fd: descriptor of the socket.
        is_done: nothing is left to do.
    """

    def __init__(self, transfer: _Transfer, numbers: Sequence[int], data_socket: DataSocket) -> None:
        self.fd = data_socket.socket.fileno()
        self.is_done = False
        self._transfer = transfer
        self._progress = transfer.progress
        self._numbers = numbers
        self._data_socket = data_socket
        self._index = -1
        self._next()

    @abstractmethod
    def room_bytes(self) -> int:
        """Bytes of the payload that earlier steps allow to move now."""

    @abstractmethod
    def move(self) -> None:
        """Moves as much as one system call does, where there is room.

        Raises:
            PeerLostError: the peer is gone, or has left.
            ConfigError: the peer carries out another operation.
        """

    @abstractmethod
    def _begin(self) -> None:
        """Prepares for the next message."""

    def _next(self) -> None:
        self._index += 1
        if self._index == len(self._numbers):
            self.is_done = True
            return
        self._number = self._numbers[self._index]
        self._at, self._stop = self._progress.bounds(self._number)
        self._begin()

    def _advance(self, num_bytes: int) -> None:
        self._at += num_bytes
        self._progress.passed[self._number] = self._at
        if self._at == self._stop:
            self._next()

    def _header(self) -> bytes:
        return self._transfer.header(self._index, self._stop - self._at)

    def _lost(self, why: str) -> PeerLostError:
        text = f"left the group before {self._transfer.operation.text} was done ({why})"
        return PeerLostError(self._data_socket.name, text)


class SocketWriter(_Direction):
    """Sends to one peer, piece by piece.

    Attributes:
        clear: the socket has taken everything that it was given last.
    """

    clear = True

    def _begin(self) -> None:
        self._piece_stop = self._at  # end of the piece that is being sent
        head = self._header()
        self._head = memoryview(head + _sum(head) if self._data_socket.checked else head)

    def room_bytes(self) -> int:
        """The rest of the current piece, or all of the next one once all of it may go."""
        if self.is_done:
            return 0
        if self._at == self._piece_stop:
            stop = min(self._at + self._progress.piece, self._stop)
            room_bytes = self._progress.room(self._number, stop)
            if room_bytes:
                self._piece_stop = stop
                if self._data_socket.checked:
                    self._head = memoryview(bytes(self._head) + _sum(self._transfer.memory[self._at : stop]))
            return room_bytes
        return self._piece_stop - self._at

    def move(self) -> None:
        """See `_Direction.move`."""
        room_bytes, head_bytes = self.room_bytes(), len(self._head)
        try:
            sent = self._data_socket.socket.sendmsg(
                [self._head, self._transfer.memory[self._at : self._at + room_bytes]]
            )
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error
        self.clear = sent == head_bytes + room_bytes
        self._head = self._head[sent:]
        if sent > head_bytes:
            self._advance(sent - head_bytes)


class SocketReader(_Direction):
    """Receives from one peer: into the vector itself, or into spare memory to be added piece by piece."""

    def __init__(self, transfer: _Transfer, numbers: Sequence[int], data_socket: DataSocket) -> None:
        progress, steps = transfer.progress, [transfer.steps[number] for number in numbers]
        longest_elems = max(
            (step.stop - step.start for step in steps if isinstance(step, Recv) and step.add), default=0
        )
        part_bytes = min(longest_elems * progress.unit, progress.piece)
        self._part = data_socket.part(part_bytes, transfer.values.dtype)
        self._part_bytes = memoryview(self._part).cast("B")  # type: ignore[arg-type]  # numpy's stubs lack Buffer
        super().__init__(transfer, numbers, data_socket)

    def _begin(self) -> None:
        step = self._transfer.steps[self._number]
        self._adds = isinstance(step, Recv) and step.add
        self._by_piece = self._adds or self._data_socket.checked
        self._filled = 0  # bytes of the piece that is to be added or verified
        self._expect(_HEADER.size + 2 * CHECKSUM.size * self._data_socket.checked)

    def _expect(self, head_bytes: int) -> None:
        """Reads this number of bytes before the next piece; its checksum, if it has one, is the last of them."""
        self._head = bytearray(head_bytes)
        self._head_left = memoryview(self._head)

    def room_bytes(self) -> int:
        """What the vector can take, or the rest of a piece to add or verify once all of it may be written."""
        if self.is_done:
            return 0
        piece = self._progress.piece
        if self._by_piece:
            room_bytes = self._progress.room(self._number, min(self._at + piece, self._stop))
            return room_bytes - self._filled if room_bytes else 0
        return min(self._progress.limit(self._number) - self._at, piece)

    def move(self) -> None:
        """See `_Direction.move`."""
        room_bytes = self.room_bytes()
        memory, start = (self._part_bytes, 0) if self._adds else (self._transfer.memory, self._at)
        payload = memory[start + self._filled : start + self._filled + room_bytes]
        try:
            came = self._data_socket.socket.recv_into(self._head_left or payload)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error
        if not came:
            raise self._lost("the connection was closed")
        if self._head_left:
            self._head_left = self._head_left[came:]
            if not self._head_left:
                self._check()
        elif self._by_piece:
            self._filled += came
            if came == room_bytes:
                self._take(memory[start : start + self._filled])
        else:
            self._advance(came)

    def _take(self, piece: memoryview) -> None:
        if self._data_socket.checked:
            self._verify(piece, self._head[-CHECKSUM.size :])
            self._expect(CHECKSUM.size)  # of the next piece of this message
        if self._adds:
            itemsize = self._progress.unit
            start, stop = self._at // itemsize, (self._at + len(piece)) // itemsize
            target = self._transfer.values[start:stop]
            np.add(target, self._part[: stop - start], out=target)
        self._filled = 0
        self._advance(len(piece))

    def _verify(self, data: bytearray | memoryview, expected: bytearray) -> None:
        try:
            verify(data, *CHECKSUM.unpack(expected))
        except DamagedError as error:
            self._data_socket.on_damage(error.size_bytes)
            text = f"{self._transfer.operation.text}: {error}"
            raise PeerLostError(self._data_socket.name, text) from None

    def _check(self) -> None:
        """Raises ConfigError unless the message is the one expected."""
        head = self._head[: _HEADER.size]
        if len(self._head) > _HEADER.size:
            self._verify(head, self._head[_HEADER.size : -CHECKSUM.size])
        if len(head) < _HEADER.size or head == self._header():
            return
        operation, peer = self._transfer.operation, self._data_socket.name
        number, digest, index, num_bytes = _HEADER.unpack(head)
        if (number, digest) != (operation.number, operation.digest):
            raise operation.mismatch(peer, number)
        raise ConfigError(
            f"{operation.text}: message {index} of {num_bytes} bytes came from {peer}, expected message "
            f"{self._index} of {self._stop - self._at}; all ranks must have the same version"
        )


def _sum(data: bytes | memoryview) -> bytes:
    return CHECKSUM.pack(checksum(data))
