"""Shared memory: segments that processes of one host map at the same time.

A segment is a memfd: it has no name, so nothing is left of it once the last process that holds it is
gone, however that ended. Who is to share it gets its descriptor over a Unix socket. Its size is sealed:
no holder can shrink it under the others, who would die of a bus error.

`SharedMemory` puts a node's exchanged vectors into segments, one each, so that peers read them in place.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import torch

from gradstream.errors import ConfigError
from gradstream.memory.vectors import Memory, Vector

__all__ = ["SHARED_BYTES", "Segment", "SharedMemory", "supported"]

SHARED_BYTES = 1 << 16
"""Vectors from this size on are worth a segment of their own; smaller ones are copied sooner than lent."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0


_NUMBERS = itertools.count(1)


def supported() -> bool:
    """Whether this system has sealed, nameless shared memory."""
    return hasattr(os, "memfd_create")


def _seals_of(fd: int) -> int:
    """0 of what is no memfd."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


class Segment:
    """A range of memory that several processes map. Use it as a context manager, or `close` it.

    Args:
        fd: of a memfd; owned by this object from here on.
        size_bytes: what is mapped.
        writable: else whoever writes it in this process dies of it.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool = True) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.number = next(_NUMBERS)  # names it within this process
        self._map = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_DEFAULT if writable else mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(
                OSError
            ):  # where the system has huge pages for shared memory, and is asked for them
                self._map.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def create(cls, size_bytes: int, name: str) -> Segment:
        """A new one, of zeros. Pages are taken from the system when they are first written.

        Args:
            size_bytes: at least 1.
            name: shown by the system among a process's maps; need not be unique.

        Raises:
            ConfigError: the system has no such memory.
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
        """That of a peer, by a descriptor that came over a socket; owned, and closed where it is refused.

        Args:
            size_bytes: what this process knows that it must have, not what the peer says; None maps all
                that it has.
            writable: for who only reads, False.

        Raises:
            ConfigError: it is smaller, or its size is not sealed.
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
        """A part of it as a flat vector; `offset_bytes` is a multiple of its elements' size."""
        return Vector(name, self.tensor(offset_bytes, elems, dtype), self, offset_bytes)

    def tensor(self, offset_bytes: int, elems: int, dtype: torch.dtype) -> torch.Tensor:
        """The same as a tensor (elems,), which keeps the memory mapped for as long as it lives."""
        assert offset_bytes % dtype.itemsize == 0
        if elems == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=elems, offset=offset_bytes)

    @property
    def bytes(self) -> memoryview:
        """All of it, writable where it was mapped so; keeps the memory mapped for as long as it lives."""
        return memoryview(self._map)

    def close(self) -> None:
        """Closes the descriptor. The memory itself goes with the last tensor on it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(slots=True)
class SharedMemory(Memory):
    """Memory whose exchanged vectors lie in segments, one each. They go with their vectors.

    Raises:
        ConfigError: when allocating, the system has no such memory.
    """

    def _allocate(
        self, elems: int, dtype: torch.dtype, name: str, *, exchanged: bool, lead_bytes: int
    ) -> Vector:
        size_bytes = elems * dtype.itemsize
        if self.shape_only or not exchanged or size_bytes < SHARED_BYTES:
            return Memory._allocate(self, elems, dtype, name, exchanged=exchanged, lead_bytes=lead_bytes)
        segment = Segment.create(lead_bytes + size_bytes, f"gradstream {name}")
        return segment.vector(lead_bytes, elems, dtype, name)
