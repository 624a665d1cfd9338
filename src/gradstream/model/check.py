"""Whether numbers are numbers."""

from __future__ import annotations

import math

import torch

__all__ = ["finite"]


def finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass over the memory and without a temporary.

    A sum is finite only if all its terms are, so the sum decides in nearly all cases; where it
    is not finite it may merely have overflowed, and each element is looked at.
    """
    if math.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all().item())
