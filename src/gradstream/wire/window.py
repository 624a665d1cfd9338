"""`SequenceWindow`: the sequence numbers of a sender that have come, as a low-water mark and a bitmap.

The last number alone would not be enough: it would refuse messages that others have overtaken. All numbers would
take more and more memory.
"""

from __future__ import annotations

import struct
from typing import Self

import xxhash

# ---- window ------------------------------------------------------------------------------


class SequenceWindow:
    """A set of positive integers that mostly grows at its upper end.

    All numbers up to the low-water mark `low` are in the set. Numbers more than `WIDTH` below the highest count as
    in the set too: the sender has given them up, or their messages were lost.
    """

    WIDTH = 4096

    __slots__ = ("_above", "low")

    def __init__(self) -> None:
        self.low = 0
        self._above = 0  # bit i: low + 1 + i is in the set; bit 0 is never set

    @classmethod
    def of(cls, low: int, above: bytes) -> Self:
        """The window that has this low-water mark, and this bitmap of the numbers above it; see `above`."""
        window = cls()
        window.low, window._above = low, int.from_bytes(above[: cls.WIDTH // 8 + 1], "little")
        return window

    @property
    def above(self) -> bytes:
        """The numbers above the low-water mark, as a bitmap, little-endian: bit i is set for low + 1 + i."""
        return self._above.to_bytes((self._above.bit_length() + 7) // 8, "little")

    def __contains__(self, number: int) -> bool:
        if number <= self.low:
            return True
        return bool(self._above >> (number - self.low - 1) & 1)

    def add(self, number: int) -> bool:
        """Adds a number. Returns whether it is new."""
        if number in self:
            return False
        ahead = number - self.low - self.WIDTH
        if ahead > 0:  # before the bit is set: the sender must not determine the length of the bitmap
            self._raise_low(ahead)
        self._above |= 1 << (number - self.low - 1)
        self._raise_low((self._above ^ (self._above + 1)).bit_length() - 1)  # trailing ones
        return True

    def _raise_low(self, count: int) -> None:
        self.low += count
        self._above >>= count


# ---- checksum ----------------------------------------------------------------------------
# Checksums of what goes over a connection that nothing else guards: neither TLS, nor the memory of one machine.
#
# TCP's checksum has 16 bits, and network cards and switches compute it anew: damage that happens in them, or in two
# places at once, gets past it (Stone and Partridge, 2000). XXH3 (Collet, 2020) has 64 bits and hashes faster than
# memory is copied. It finds damage by accident; it is no protection against an attacker.

CHECKSUM = struct.Struct("<Q")
"""A checksum as bytes."""


def checksum(*parts: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """The checksum of all parts, one after the other.

    Args:
        parts: contiguous bytes, which are not copied.
        seed: another seed gives another checksum: bytes that belong elsewhere do not pass.
    """
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0], seed)
    state = xxhash.xxh3_64(seed=seed)
    for part in parts:
        state.update(part)
    return state.intdigest()
