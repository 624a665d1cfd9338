"""The `Arena`: places in one piece of memory, each of which is taken, and some time later given back.

Sizes are rounded up to powers of two. The place given back last is taken first: it is still in the
processor's cache. Places are never cut or joined, so that those of one size cannot use up what another
size has had before; who finds no place copies in another way.
"""

from __future__ import annotations

__all__ = ["Arena"]


class Arena:
    """Places in [start_bytes, stop_bytes), whose sizes are multiples of `ALIGNMENT_BYTES`.

    Args:
        start_bytes, stop_bytes: the memory.
    """

    ALIGNMENT_BYTES = 4096

    def __init__(self, start_bytes: int, stop_bytes: int) -> None:
        self._next_bytes = start_bytes
        self._stop_bytes = stop_bytes
        self._free: dict[int, list[int]] = {}

    def take(self, size_bytes: int) -> int | None:
        """Offset of a place of at least so many bytes; None where there is none left."""
        room_bytes = _room(size_bytes)
        free = self._free.get(room_bytes)
        if free:
            return free.pop()
        offset = self._next_bytes
        if offset + room_bytes > self._stop_bytes:
            return None
        self._next_bytes = offset + room_bytes
        return offset

    def give_back(self, offset_bytes: int, size_bytes: int) -> None:
        """A place that was taken for so many bytes."""
        self._free.setdefault(_room(size_bytes), []).append(offset_bytes)


def _room(size_bytes: int) -> int:
    return max(Arena.ALIGNMENT_BYTES, 1 << (size_bytes - 1).bit_length())
