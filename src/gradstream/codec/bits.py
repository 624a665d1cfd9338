"""Small whole numbers in few bits each."""

from __future__ import annotations

import numpy as np
import torch

TILE_ELEMS = 1 << 16
"""Codecs go through a tensor in pieces of so many elements, which stay in the cache from one pass to the next."""


def packed_bytes(elems: int, bits: int) -> int:
    """The size in bytes of so many numbers of 1, 2, 4 or 8 bits."""
    return -(-elems * bits // 8)


def pack(codes: torch.Tensor, bits: int, into: torch.Tensor) -> None:
    """Writes numbers, the first one in the lowest bits of a byte.

    Args:
        codes: (n,) uint8, each below 2^bits.
        bits: 1, 2, 4 or 8.
        into: (`packed_bytes(n, bits)`,) uint8, overwritten.
    """
    if bits == 8:
        into.copy_(codes)
        return
    if bits == 1:
        into.numpy()[:] = np.packbits(codes.numpy(), bitorder="little")
        return
    each = 8 // bits
    whole = len(codes) // each * each
    if whole:
        groups, out = codes[:whole].view(-1, each), into[: whole // each]
        out.copy_(groups[:, 0])
        for place in range(1, each):
            out.bitwise_or_(groups[:, place].bitwise_left_shift(bits * place))
    if whole < len(codes):
        last = 0
        for place, code in enumerate(codes[whole:].tolist()):
            last |= code << bits * place
        into[-1] = last


def unpack(packed: torch.Tensor, bits: int, elems: int) -> torch.Tensor:
    """The numbers that `pack` has written, (elems,) uint8; of 8 bits the memory itself."""
    if bits == 8:
        return packed
    if bits == 1:
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=elems, bitorder="little"))
    each, mask = 8 // bits, (1 << bits) - 1
    codes = torch.empty(len(packed), each, dtype=torch.uint8)
    for place in range(each):
        torch.bitwise_and(packed.bitwise_right_shift(bits * place), mask, out=codes[:, place])
    return codes.view(-1)[:elems]
