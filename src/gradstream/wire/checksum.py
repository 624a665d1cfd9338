"""Checksums of what goes over a connection that nothing else guards: neither TLS, nor the memory of one machine.

TCP's checksum has 16 bits, and network cards and switches compute it anew: damage that happens in them, or in two
places at once, gets past it (Stone and Partridge, 2000). XXH3 (Collet, 2020) has 64 bits and hashes faster than memory
is copied. It finds damage by accident; it is no protection against an attacker.
"""

from __future__ import annotations

import struct

import xxhash

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
