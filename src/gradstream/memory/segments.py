"""Shared memory: segments that processes of one host map at the same time.

A segment is a memfd. It has no name, so the system frees it when the last process that maps it ends, even by a
crash. Another process gets its descriptor over a Unix socket. Its size is sealed: if a process could shrink it while
others read it, they would end with a bus error.

`SharedMemory` puts each of a node's exchanged vectors into a segment, so that peers read it in place.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import sys
from contextlib import suppress
from dataclasses import dataclass

import torch

from gradstream.errors import ConfigError
from gradstream.memory.vectors import Memory, Vector

SHARED_BYTES = 1 << 16
"""Vectors of at least this size get a segment each. A smaller vector is faster to copy than to lend."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0

_NUMBERS = itertools.count(1)


def supported() -> bool:
    """Whether this system has sealed, nameless shared memory."""
    return hasattr(os, "memfd_create")


def _seals_of(fd: int) -> int:
    """Seals of a memfd; 0 for any other descriptor."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


class Segment:
    """A range of memory that several processes map. Use it as a context manager, or `close` it.

    Args:
        fd: descriptor of a memfd; this object closes it.
        size_bytes: number of bytes that are mapped.
        writable: False maps it for reading; a write then ends the process.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool = True) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.number = next(_NUMBERS)  # identifies the segment within this process
        self._map = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_DEFAULT if writable else mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the system may have no huge pages for shared memory
                self._map.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def create(cls, size_bytes: int, name: str) -> Segment:
        """Creates a segment of zeros. The system provides a page when it is first written.

        Args:
            size_bytes: size of the segment, at least 1.
            name: name that the system shows in the memory map of a process. It need not be unique.

        Raises:
            ConfigError: the system has no nameless shared memory.
        """
        if not supported():
            raise ConfigError(f"shared memory {name!r}: needs Linux (memfd_create); use the carrier 'tcp'")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size_bytes: int | None = None, *, writable: bool = True) -> Segment:
        """Maps the segment of a peer.

        Args:
            fd: the descriptor, received over a socket. This object closes it, also if it refuses the segment.
            size_bytes: smallest size that is accepted, which must not come from the peer. None maps the whole
                segment.
            writable: False maps it for reading.

        Raises:
            ConfigError: the segment is smaller, or its size is not sealed.
        """
        try:
            actual_bytes, seals = os.fstat(fd).st_size, _seals_of(fd)
            least_bytes = max(1, size_bytes or 0)
            if actual_bytes < least_bytes or seals & SEALS != SEALS:
                raise ConfigError(
                    f"shared memory of {actual_bytes} bytes with seals {seals:#x}: expected at least "
                    f"{least_bytes} bytes whose size is sealed; all processes must run the same job"
                )
            return cls(fd, actual_bytes if size_bytes is None else size_bytes, writable=writable)
        except BaseException:
            os.close(fd)
            raise

    def vector(self, offset_bytes: int, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """A part of the segment as a flat vector; `offset_bytes` must be a multiple of the size of an element."""
        return Vector(name, self.tensor(offset_bytes, elems, dtype), self, offset_bytes)

    def tensor(self, offset_bytes: int, elems: int, dtype: torch.dtype) -> torch.Tensor:
        """A part of the segment as a tensor (elems,). The tensor keeps the memory mapped."""
        assert offset_bytes % dtype.itemsize == 0
        if elems == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=elems, offset=offset_bytes)

    @property
    def bytes(self) -> memoryview:
        """All bytes of the segment. The view keeps the memory mapped."""
        return memoryview(self._map)

    def close(self) -> None:
        """Closes the descriptor. The memory stays mapped until the last tensor on it is gone. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(slots=True)
class SharedMemory(Memory):
    """Allocates each exchanged vector in a separate segment, which is freed with the vector.

    Raises:
        ConfigError: on allocation, if the system has no nameless shared memory.
    """

    def _allocate(
        self, elems: int, dtype: torch.dtype, name: str, *, exchanged: bool, lead_bytes: int
    ) -> Vector:
        size_bytes = elems * dtype.itemsize
        if self.shape_only or not exchanged or size_bytes < SHARED_BYTES:
            return Memory._allocate(self, elems, dtype, name, exchanged=exchanged, lead_bytes=lead_bytes)
        segment = Segment.create(lead_bytes + size_bytes, f"gradstream {name}")
        return segment.vector(lead_bytes, elems, dtype, name)
