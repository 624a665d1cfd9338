"""Lanes: what goes to one rank, or comes from it, over a socket, one message after the other.

A message is a header and the bytes of one step. What arrives is believed only where the header says that it
belongs to the same operation; sizes and places come from the plan.
"""

from __future__ import annotations

import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradstream.collectives.operation import Operation
from gradstream.collectives.plan import DependencyPlan
from gradstream.collectives.schedule import Recv, Step
from gradstream.errors import ConfigError, PeerLostError

__all__ = ["DataSocket", "PlanProgress", "SocketDirection", "SocketReader", "SocketWriter"]

_HEADER = struct.Struct("<QIIQ")
"""Number and digest of the operation, which message of it between the two ranks, bytes of its payload."""


class DataSocket:
    """A socket to a rank, and memory for a piece that is to be added.

    That memory is kept, since new memory costs page faults.

    Args:
        connected: non-blocking, and used by nobody else.
        name: of the rank.
    """

    def __init__(self, connected: socket.socket, name: str) -> None:
        self.socket = connected
        self.name = name
        self._memory = np.empty(0, dtype=np.uint8)

    def part(self, num_bytes: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """So many bytes as elements; valid until the next call."""
        if self._memory.nbytes < num_bytes:
            self._memory = np.empty(num_bytes, dtype=np.uint8)
        return self._memory[:num_bytes].view(dtype)


class PlanProgress:
    """How far each step of a rank's plan is, in bytes of the vector, and how far it may go.

    Args:
        operation: what the plan is of.
        plan: of this rank.
        tensor: the elements, borrowed for writing.
        piece_bytes: the most that one system call moves, and one sum takes.
    """

    def __init__(
        self, operation: Operation, plan: DependencyPlan, tensor: torch.Tensor, piece_bytes: int
    ) -> None:
        self.operation = operation
        self.steps = plan.steps
        self.values = tensor.numpy()
        self.memory = memoryview(self.values).cast("B")  # type: ignore[arg-type]
        self.itemsize = self.values.itemsize
        self.piece_bytes = max(1, piece_bytes // self.itemsize) * self.itemsize
        self.passed = [step.start * self.itemsize for step in plan.steps]  # bytes below are done with
        self._stops = [step.stop * self.itemsize for step in plan.steps]
        self._after = plan.after

    def limit(self, number: int) -> int:
        """Below which byte earlier steps are done with the elements of this one."""
        low = self._stops[number]
        for earlier in self._after[number]:
            if self.passed[earlier] < self._stops[earlier]:
                low = min(low, self.passed[earlier])
        return low


class SocketDirection(ABC):
    """One direction.

    Args:
        passage: of this rank's plan.
        steps: the numbers of those with that rank, in this direction.
        line: to it.

    Attributes:
        number: of the socket's descriptor.
        is_done: there is nothing more to do.
    """

    def __init__(self, passage: PlanProgress, steps: Sequence[int], line: DataSocket) -> None:
        self.number = line.socket.fileno()
        self.is_done = False
        self._passage = passage
        self._steps = steps
        self._line = line
        self._index = -1
        self._next()

    @abstractmethod
    def room_bytes(self) -> int:
        """How much of a payload can be moved now, as far as earlier steps are concerned."""

    @abstractmethod
    def move(self) -> None:
        """One system call's worth, where there is room.

        Raises:
            PeerLostError: the rank is gone, or has left.
            ConfigError: it does something else.
        """

    @abstractmethod
    def _begin(self, step: Step) -> None:
        """A message is due."""

    def _next(self) -> None:
        self._index += 1
        if self._index == len(self._steps):
            self.is_done = True
            return
        self._number = self._steps[self._index]
        step = self._passage.steps[self._number]
        self._at, self._stop = (bound * self._passage.itemsize for bound in (step.start, step.stop))
        self._begin(step)

    def _advance(self, num_bytes: int) -> None:
        self._at += num_bytes
        self._passage.passed[self._number] = self._at
        if self._at == self._stop:
            self._next()

    def _header(self) -> bytes:
        operation = self._passage.operation
        return _HEADER.pack(operation.number, operation.digest, self._index, self._stop - self._at)

    def _lost(self, why: str) -> PeerLostError:
        text = f"left the group before {self._passage.operation.text} was done ({why})"
        return PeerLostError(self._line.name, text)


class SocketWriter(SocketDirection):
    """Sends.

    Attributes:
        clear: the socket has taken all that it was given last.
    """

    clear = True

    def _begin(self, step: Step) -> None:
        self._edge = self._at  # where the piece that is being sent ends
        self._head = memoryview(self._header())

    def room_bytes(self) -> int:
        """To the end of a piece, once all of it may go: bits of it would take a system call each."""
        if self.is_done:
            return 0
        if self._at == self._edge:
            edge = min(self._at + self._passage.piece_bytes, self._stop)
            if self._passage.limit(self._number) < edge:
                return 0
            self._edge = edge
        return self._edge - self._at

    def move(self) -> None:
        """See `SocketDirection.move`."""
        room_bytes, head_bytes = self.room_bytes(), len(self._head)
        try:
            sent = self._line.socket.sendmsg(
                [self._head, self._passage.memory[self._at : self._at + room_bytes]]
            )
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error
        self.clear = sent == head_bytes + room_bytes
        self._head = self._head[sent:]
        if sent > head_bytes:
            self._advance(sent - head_bytes)


class SocketReader(SocketDirection):
    """Receives: where it belongs, or to be added piece by piece."""

    def __init__(self, passage: PlanProgress, steps: Sequence[int], line: DataSocket) -> None:
        adds = [passage.steps[number] for number in steps if _adds(passage.steps[number])]
        longest_bytes = max((step.stop - step.start for step in adds), default=0) * passage.itemsize
        self._part = line.part(min(longest_bytes, passage.piece_bytes), passage.values.dtype)
        self._part_bytes = memoryview(self._part).cast("B")  # type: ignore[arg-type]
        super().__init__(passage, steps, line)

    def _begin(self, step: Step) -> None:
        self._adds = _adds(step)
        self._filled = 0  # bytes of the piece that is to be added
        self._head = bytearray(_HEADER.size)
        self._head_left = memoryview(self._head)

    def room_bytes(self) -> int:
        """What is added is received once all of the piece may be written."""
        if self.is_done:
            return 0
        piece_bytes = self._passage.piece_bytes
        room = min(self._passage.limit(self._number) - self._at, piece_bytes)
        if not self._adds:
            return room
        return room - self._filled if room == min(self._stop - self._at, piece_bytes) else 0

    def move(self) -> None:
        """See `SocketDirection.move`."""
        room_bytes = self.room_bytes()
        if self._adds:
            payload = self._part_bytes[self._filled : self._filled + room_bytes]
        else:
            payload = self._passage.memory[self._at : self._at + room_bytes]
        try:
            came = self._line.socket.recv_into(self._head_left or payload)
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
        elif self._adds:
            self._filled += came
            if came == room_bytes:
                self._add()
        else:
            self._advance(came)

    def _add(self) -> None:
        itemsize = self._passage.itemsize
        start, stop = self._at // itemsize, (self._at + self._filled) // itemsize
        into = self._passage.values[start:stop]
        np.add(into, self._part[: stop - start], out=into)
        filled, self._filled = self._filled, 0
        self._advance(filled)

    def _check(self) -> None:
        """Raises ConfigError unless the message is the one expected."""
        if self._head == self._header():
            return
        operation, peer = self._passage.operation, self._line.name
        number, digest, index, num_bytes = _HEADER.unpack(self._head)
        if (number, digest) != (operation.number, operation.digest):
            raise operation.mismatch(peer, number)
        raise ConfigError(
            f"{operation.text}: message {index} of {num_bytes} bytes came from {peer}, expected message "
            f"{self._index} of {self._stop - self._at}; all ranks must have the same version"
        )


def _adds(step: Step) -> bool:
    return isinstance(step, Recv) and step.add
