"""Seeds of codecs, which every process can compute by itself."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """A number in [0, 2^63) that depends on these parts alone, on all machines."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
