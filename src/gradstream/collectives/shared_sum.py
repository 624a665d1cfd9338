"""The arithmetic of an allreduce inside a host: one rank's slice of a sum over all ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from gradstream.collectives.shared_native import native

__all__ = ["BLOCK_ELEMS", "plain_sum", "weighted_sum"]

BLOCK_ELEMS = 1 << 16
"""Of what is added at once: a block of float32 of two ranks and the sum stay in a core's own cache.

A multiple of 64, since kernels round differently at other cuts.
"""

PAST_CACHE_BYTES = 4 << 20
"""From this size on a sum is stored past the cache: it would not stay there until it is used."""


def weighted_sum(
    parts: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Writes Σ_r weights[r] · parts[r], in the order of ranks, with the bits of a parameter server's sum.

    Each element of the parts is read once, each of `out` written once.

    Args:
        parts: (n,) each.
        out: (n,); may be one of the parts, but overlap none of them otherwise.
        scratch: (BLOCK_ELEMS,) of the same dtype, for sums that are not complete.
    """
    code = native()
    if code is None or (add := code.sum.get(out.dtype)) is None:
        plain_sum(parts, weights, out, scratch)
        return
    at = out.data_ptr()
    add(
        at,
        (ctypes.c_void_p * len(parts))(*[part.data_ptr() for part in parts]),
        (ctypes.c_double * len(parts))(*weights),
        len(parts),
        out.numel(),
        at % 64 == 0 and out.nbytes >= PAST_CACHE_BYTES,
    )


def plain_sum(
    parts: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor, scratch: torch.Tensor
) -> None:
    """`weighted_sum` by torch's kernels, with the same bits."""
    if len(parts) == 1:
        if weights[0] != 1.0:
            torch.mul(parts[0], weights[0], out=out)
        elif out.data_ptr() != parts[0].data_ptr():
            out.copy_(parts[0])
        return
    if len(parts) == 2 and weights[0] == 1.0:  # one pass: nothing to keep in the cache
        torch.add(parts[0], parts[1], alpha=_factor(weights[1]), out=out)
        return
    for out_block, *blocks in zip(*(torch.split(each, BLOCK_ELEMS) for each in (out, *parts)), strict=True):
        kept = scratch[: len(out_block)]
        total = blocks[0] if weights[0] == 1.0 else torch.mul(blocks[0], weights[0], out=kept)
        for block, weight in zip(blocks[1:-1], weights[1:-1], strict=True):
            total = torch.add(total, block, alpha=_factor(weight), out=kept)
        torch.add(total, blocks[-1], alpha=_factor(weights[-1]), out=out_block)


def _factor(weight: float) -> float:
    return 1 if weight == 1.0 else weight  # sums of integers take no other factor
