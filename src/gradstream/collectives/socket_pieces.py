"""Pieces of an operation over data sockets: which are left to send to a peer, and which are due from it."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradstream.collectives.data_sockets import DataSocket
from gradstream.collectives.plan import Operation, PlanProgress
from gradstream.errors import ConfigError

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
