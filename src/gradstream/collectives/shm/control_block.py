"""What a rank tells the others of its host through shared memory: a page of words that it alone writes.

A word is eight bytes in a cache line that no other rank writes, and is stored whole. Who reads a word
also sees everything that was written before it: x86-64 keeps the order of stores. Between storing a word
of one's own and loading another's a `fence` is needed, since a load may overtake a store.
"""

from __future__ import annotations

import enum
import platform
import struct
from threading import Lock
from typing import NamedTuple

import torch

from gradstream.memory.segments import Segment, supported

__all__ = [
    "ARRIVED",
    "ASLEEP",
    "BEATS",
    "BOARD_BYTES",
    "CALLS_AT",
    "CALL_BYTES",
    "CORE",
    "DTYPES",
    "SLOTS_AT",
    "SLOT_BYTES",
    "TROUBLE",
    "Call",
    "ControlBlock",
    "OperationCode",
    "available",
    "fence",
]

ARRIVED = 0
"""Barriers that this rank has come to."""
CORE = 1
"""The processor's core on which it came last, as machine code says."""
ASLEEP = 8
"""Whether it sleeps, and has to be rung for."""
BEATS = 16
"""Grows while the rank's process lives, however long its arithmetic takes."""
TROUBLE = 17
"""Why the group is broken: kind + 8 · (rank of the culprit); 0 while this rank takes it for whole."""

SLOT_BYTES = 1 << 16
"""Vectors up to this size are copied onto the board, where each rank adds up all of them by itself."""

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
"""Of vectors in shared memory, by number."""

CALLS_AT = 256
SLOTS_AT = 4096
BOARD_BYTES = SLOTS_AT + 2 * SLOT_BYTES

_CALL = struct.Struct("7qd")
CALL_BYTES = _CALL.size


def available() -> bool:
    """Whether ranks can share memory here: sealed segments, and a processor that keeps stores in order."""
    return supported() and platform.machine() in ("x86_64", "AMD64")


class OperationCode(enum.IntEnum):
    """What ranks do together. In common memory there is nothing to copy, only to wait for."""

    BARRIER = 0
    ALLREDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    ALL_GATHER_COMMON = 5
    BROADCAST_COMMON = 6


class Call(NamedTuple):
    """What a rank asks for, on its board before it comes to the first barrier."""

    operation: int
    dtype: int
    elems: int
    root: int = 0
    owner: int = -1
    """Its part lies in a vector of this rank's; -1 where the others need none, or find it in its slot."""
    item: int = -1
    """The number of that vector among its owner's."""
    start: int = 0
    """Its part begins at this element."""
    weight: float = 1.0

    @property
    def matter(self) -> tuple[int, int, int, int]:
        """What must be the same at all ranks: operation, dtype, length, root."""
        return self[:4]

    def __str__(self) -> str:
        name = OperationCode(self.operation).name.lower()
        return f"in {name} of {self.elems} elements of {str(DTYPES[self.dtype]).removeprefix('torch.')}"


class ControlBlock:
    """One rank's page: written by that rank, read by all.

    There are two places for a call and two for a small vector, used by turns: a rank gets to its next call
    but one only when all have come to the next, and so are done with this one.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._bytes = segment.bytes
        self.address = segment.tensor(0, 1, torch.uint8).data_ptr()
        self.words: memoryview[int] = self._bytes[:CALLS_AT].cast("Q")

    def write(self, turn: int, call: Call) -> None:
        """Posts a call; `turn` is 0 or 1."""
        _CALL.pack_into(self._bytes, CALLS_AT + _CALL.size * turn, *call)

    def read(self, turn: int) -> Call:
        """The call posted last for this turn."""
        return Call._make(_CALL.unpack_from(self._bytes, CALLS_AT + _CALL.size * turn))

    def slot(self, turn: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for a small vector."""
        return self._segment.tensor(SLOTS_AT + SLOT_BYTES * turn, SLOT_BYTES // dtype.itemsize, dtype)


def fence(lock: Lock) -> None:
    """What was stored before is seen by others before anything is loaded after.

    Taking a lock is an atomic operation, and on x86-64 each of these is a full fence.
    """
    with lock:
        pass
