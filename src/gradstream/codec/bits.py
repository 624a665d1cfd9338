"""Small whole numbers in few bits each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

TILE_ELEMS = 1 << 16
"""Codecs go through a tensor in pieces of so many elements, which stay in the cache from one pass to the next."""


def tiles(elems: int, block: int, bits: int) -> Iterator[tuple[slice, slice, slice]]:
    """Whole blocks, some at a time, and then what is left: elements, blocks, and bytes of their codes of `bits`."""
    whole, size = elems // block * block, max(1, TILE_ELEMS // block) * block
    for start in [*range(0, whole, size), *([whole] if whole < elems else [])]:
        stop = min(start + size, whole) if start < whole else elems
        yield (
            slice(start, stop),
            slice(start // block, -(-stop // block)),
            slice(start * bits // 8, packed_bytes(stop, bits)),
        )


def packed_bytes(elems: int, bits: int) -> int:
    """The size in bytes of so many numbers of 1, 2, 4 or 8 bits."""
    return -(-elems * bits // 8)


def as_codes(numbers: torch.Tensor) -> torch.Tensor:
    """Whole numbers from 0 to 127 as flat uint8. By way of int8: torch converts floats to that six times as fast."""
    return numbers.to(torch.int8).view(torch.uint8).view(-1)


def pack(codes: torch.Tensor, bits: int, into: torch.Tensor) -> None:
    """Writes numbers. Byte j has those at j, j + m, j + 2m, ... of m bytes, the first in its lowest bits.

    Numbers at a distance go into one byte, so that each step goes through contiguous memory. Of one bit, those of a
    byte are neighbours.

    Args:
        codes: (n,) uint8, each below 2^bits.
        bits: 1, 2, 4 or 8.
        into: (`packed_bytes(n, bits)`,) uint8, overwritten.
    """
    if bits == 1:
        into.numpy()[:] = np.packbits(codes.numpy(), bitorder="little")
        return
    pieces = _pieces(codes, len(into))
    if pieces:
        into.copy_(pieces[0])
    for place, piece in enumerate(pieces[1:], start=1):
        into[: len(piece)].bitwise_or_(piece.bitwise_left_shift(bits * place))


def unpack(packed: torch.Tensor, bits: int, elems: int) -> torch.Tensor:
    """The numbers that `pack` has written, (elems,) uint8; of 8 bits the memory itself."""
    if bits == 8:
        return packed
    if bits == 1:
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=elems, bitorder="little"))
    mask, codes = (1 << bits) - 1, torch.empty(elems, dtype=torch.uint8)
    for place, piece in enumerate(_pieces(codes, len(packed))):
        torch.bitwise_right_shift(packed[: len(piece)], bits * place, out=piece).bitwise_and_(mask)
    return codes


def _pieces(codes: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    return torch.split(codes, length) if length else ()
