"""Checksums of arrays, by which machines of a run compare their data."""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

QUICK_BYTES = 16 << 20
WHOLE_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 32


def checksum_of(arrays: Iterable[np.ndarray[Any, Any]], *more: str) -> str:
    """The checksum of arrays: of shapes, dtypes, and bytes in C order, little-endian.

    It reads arrays up to 64 MiB whole. Of larger ones it reads the first block, the last, and 30 blocks between them,
    of 1 MiB each, so that a memory-mapped array of any size takes a tenth of a second. It misses differences
    elsewhere.

    Args:
        arrays: the arrays.
        more: texts that identify the data besides.
    """
    digest = hashlib.sha256(repr(more).encode())
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype.newbyteorder('<').str}".encode())
        for block in _blocks(array):
            if block.dtype.byteorder == ">" or (block.dtype.byteorder == "=" and sys.byteorder == "big"):
                block = block.astype(block.dtype.newbyteorder("<"))
            digest.update(np.ascontiguousarray(block).data)
    return digest.hexdigest()[:32]


def quick_checks(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, str]:
    """A quick checksum of each array, by name, for processes of one machine: shape, dtype and a CRC-32.

    It takes some milliseconds: it reads at most 16 MiB of all arrays together, in evenly spread blocks.
    """
    share_bytes = QUICK_BYTES // max(1, len(arrays))
    checks = {}
    for name, array in arrays.items():
        crc = 0
        for block in _blocks(array, share_bytes, share_bytes // NUM_BLOCKS):
            crc = zlib.crc32(np.ascontiguousarray(block).data, crc)
        checks[name] = f"{array.shape} {array.dtype}, content {crc:08x}"
    return checks


def _blocks(
    array: np.ndarray[Any, Any], whole_bytes: int = WHOLE_BYTES, block_bytes: int = BLOCK_BYTES
) -> Iterable[np.ndarray[Any, Any]]:
    """A small array itself; evenly spread blocks of rows of a large one."""
    if array.nbytes <= whole_bytes or array.ndim == 0:
        return [array]
    rows = max(1, block_bytes * len(array) // array.nbytes)
    starts = np.linspace(0, len(array) - rows, NUM_BLOCKS).astype(int)
    return (array[start : start + rows] for start in starts)
