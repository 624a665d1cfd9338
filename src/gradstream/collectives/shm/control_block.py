"""The control block: a page of shared memory through which a rank tells the others of its host how far it is.

Only its own rank writes a block. A word has eight bytes, lies in a cache line that no other rank writes, and is
stored whole. A rank that reads a word also sees everything that was written before it, since x86-64 keeps the
order of stores. Between storing its own word and loading another's a rank needs a `fence`, since a load may
overtake a store.
"""

from __future__ import annotations

import enum
import platform
import struct
from threading import Lock
from typing import NamedTuple

import torch

from gradstream.memory.segments import Segment, supported

ARRIVED = 0
"""Number of barriers that this rank has arrived at."""
CORE = 1
"""The core of the processor on which it arrived last; machine code writes it."""
ASLEEP = 8
"""Whether it sleeps and has to be woken."""
BEATS = 16
"""Grows while the rank's process lives, however long its arithmetic takes."""
FAILURE = 17
"""Why the group is broken: kind + 8 · (rank of the culprit). 0 while this rank takes the group for whole."""

SLOT_BYTES = 1 << 16
"""Vectors up to this size are copied into the control block. Each rank adds up all of them by itself."""

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
"""Types of vectors in shared memory; a type's number is its index."""

CALLS_AT = 256
SLOTS_AT = 4096
BLOCK_BYTES = SLOTS_AT + 2 * SLOT_BYTES

_CALL = struct.Struct("7qd")
CALL_BYTES = _CALL.size


def available() -> bool:
    """Whether ranks can share memory here: it takes sealed segments and a processor that keeps stores in order."""
    return supported() and platform.machine() in ("x86_64", "AMD64")


class OperationCode(enum.IntEnum):
    """The collective operations. On a common vector, ranks only wait for each other, and copy nothing."""

    BARRIER = 0
    ALLREDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    ALL_GATHER_COMMON = 5
    BROADCAST_COMMON = 6


class Call(NamedTuple):
    """What a rank asks for; it lies in its control block before the rank arrives at the first barrier."""

    operation: int
    dtype: int
    elems: int
    root: int = 0
    owner: int = -1
    """The rank that made the vector of its part. -1 if the others need no part, or find it in the slot."""
    item: int = -1
    """Number of that vector among those of its owner."""
    start: int = 0
    """Element at which the part begins."""
    weight: float = 1.0

    @property
    def matter(self) -> tuple[int, int, int, int]:
        """The fields that must be the same at all ranks: operation, dtype, length, root."""
        return self[:4]

    def __str__(self) -> str:
        name = OperationCode(self.operation).name.lower()
        return f"in {name} of {self.elems} elements of {str(DTYPES[self.dtype]).removeprefix('torch.')}"


class ControlBlock:
    """One rank's page: that rank writes it, all read it.

    There are two places for a call and two for a small vector, used in turn. A rank reaches its next call but
    one only when all ranks have arrived at the next one, and so are done with this one.

    Args:
        segment: BLOCK_BYTES of shared memory.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._bytes = segment.bytes
        self.address = segment.tensor(0, 1, torch.uint8).data_ptr()
        self.words: memoryview[int] = self._bytes[:CALLS_AT].cast("Q")

    def write(self, turn: int, call: Call) -> None:
        """Posts a call in place `turn`, 0 or 1."""
        _CALL.pack_into(self._bytes, CALLS_AT + _CALL.size * turn, *call)

    def read(self, turn: int) -> Call:
        """The call that was posted last in this place."""
        return Call._make(_CALL.unpack_from(self._bytes, CALLS_AT + _CALL.size * turn))

    def slot(self, turn: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements that a small vector of this type can take in this place."""
        return self._segment.tensor(SLOTS_AT + SLOT_BYTES * turn, SLOT_BYTES // dtype.itemsize, dtype)


def fence(lock: Lock) -> None:
    """A full memory fence: other processes see this thread's earlier stores before its later loads.

    Taking a lock is an atomic operation, which is a full fence on x86-64.
    """
    with lock:
        pass
