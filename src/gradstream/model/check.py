"""Checks vectors for NaN and infinities."""

from __future__ import annotations

import math

import torch

__all__ = ["finite"]


def finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass over the memory and without a temporary.

    A sum is finite only if all its terms are, so the sum decides in nearly all cases. A sum that is not finite
    may merely have overflowed; then each element is checked.
    """
    if math.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all().item())
