"""Shared memory: segments that processes of one host map at the same time.

A segment is a memfd: it has no name, so nothing is left of it once the last process that holds it is
gone, however that ended. Who is to share it gets its descriptor over a Unix socket. Its size is sealed:
no holder can shrink it under the others, who would die of a bus error.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from types import TracebackType

import torch

from gradstream.errors import ConfigError
from gradstream.memory import ALIGNMENT_BYTES, Vector

__all__ = ["Segment", "supported"]

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0


def supported() -> bool:
    """Whether this system has sealed, nameless shared memory."""
    return hasattr(os, "memfd_create")


class Segment:
    """A range of memory that several processes map. Use it as a context manager, or `close` it.

    Args:
        fd: of a memfd; owned by this object from here on.
        size_bytes: what is mapped.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes)

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
    def attach(cls, fd: int, size_bytes: int) -> Segment:
        """That of a peer, by a descriptor that came over a socket; owned, and closed where it is refused.

        Args:
            size_bytes: what this process knows that it must have; not what the peer says.

        Raises:
            ConfigError: it is smaller, or its size is not sealed.
        """
        try:
            actual_bytes, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if actual_bytes < size_bytes or seals & SEALS != SEALS:
                raise ConfigError(
                    f"shared memory of {actual_bytes} bytes with seals {seals:#x}: expected at least "
                    f"{size_bytes} bytes whose size is sealed; all processes must run the same job"
                )
            return cls(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise

    def vector(self, offset_bytes: int, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """A part of it as a flat vector; `offset_bytes` is a multiple of `ALIGNMENT_BYTES`."""
        return Vector(name, self.tensor(offset_bytes, elems, dtype))

    def tensor(self, offset_bytes: int, elems: int, dtype: torch.dtype) -> torch.Tensor:
        """The same as a tensor (elems,), which keeps the memory mapped for as long as it lives."""
        assert offset_bytes % ALIGNMENT_BYTES == 0
        if elems == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=elems, offset=offset_bytes)

    @property
    def bytes(self) -> memoryview:
        """All of it, writable; keeps the memory mapped for as long as it lives."""
        return memoryview(self._map)

    def close(self) -> None:
        """Closes the descriptor. The memory itself goes with the last tensor on it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
