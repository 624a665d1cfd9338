"""The arithmetic of an allreduce inside a host: one rank's slice of a sum over all ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from gradstream.collectives.shm.native import native

BLOCK_ELEMS = 1 << 16
"""Elements that are added at once: a block of float32 of two ranks and the sum stay in a core's own cache.

It is a multiple of 64, since kernels round differently at other cuts.
"""

PAST_CACHE_BYTES = 4 << 20
"""From this size on a sum is stored past the cache, where it would not stay until it is used."""


class WeightedSum:
    """Adds up Σ_r weights[r] · parts[r] into `out`, in the order of ranks, with the bits of a parameter server's sum.

    It reads each element of the parts once, and writes each of `out` once. Keep it to call it again: to make
    one takes as long as to add up some ten thousand elements.

    Args:
        parts: vectors of shape (n,).
        out: (n,); one of the parts, or memory that overlaps none of them.
        scratch: (BLOCK_ELEMS,) of the same dtype, for incomplete sums.
    """

    def __init__(self, parts: Sequence[torch.Tensor], out: torch.Tensor, scratch: torch.Tensor) -> None:
        self._parts = parts
        self._out = out
        self._scratch = scratch
        code = native()
        self._add = None if code is None else code.sum.get(out.dtype)
        at = out.data_ptr()
        self._weights = (ctypes.c_double * len(parts))()
        self._arguments = (
            at,
            (ctypes.c_void_p * len(parts))(*[part.data_ptr() for part in parts]),
            self._weights,
            len(parts),
            out.numel(),
            at % 64 == 0 and out.nbytes >= PAST_CACHE_BYTES,
        )

    def __call__(self, weights: Sequence[float]) -> None:
        """Adds up."""
        if self._add is None:
            plain_sum(self._parts, weights, self._out, self._scratch)
        else:
            self._weights[:] = list(weights)
            self._add(*self._arguments)


def plain_sum(
    parts: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Does what `WeightedSum` does with torch's kernels, with the same bits."""
    if len(parts) == 1:
        if weights[0] != 1.0:
            torch.mul(parts[0], weights[0], out=out)
        elif out.data_ptr() != parts[0].data_ptr():
            out.copy_(parts[0])
        return
    if len(parts) == 2 and weights[0] == 1.0:  # one pass is enough
        torch.add(parts[0], parts[1], alpha=_factor(weights[1]), out=out)
        return
    for out_block, *blocks in zip(*(torch.split(each, BLOCK_ELEMS) for each in (out, *parts)), strict=True):
        kept = scratch[: len(out_block)]
        total = blocks[0] if weights[0] == 1.0 else torch.mul(blocks[0], weights[0], out=kept)
        for block, weight in zip(blocks[1:-1], weights[1:-1], strict=True):
            total = torch.add(total, block, alpha=_factor(weight), out=kept)
        torch.add(total, blocks[-1], alpha=_factor(weights[-1]), out=out_block)


def _factor(weight: float) -> float:
    return 1 if weight == 1.0 else weight  # torch takes no floating-point factor for integers
