"""Element types on the wire: little-endian IEEE 754, as torch holds them on this machine."""

from __future__ import annotations

import sys

import torch

from gradstream.errors import ConfigError
from gradstream.wire import v1

if sys.byteorder != "little":  # payloads are sent as they lie in memory
    raise ImportError("gradstream's wire format needs a little-endian machine")

_TO_WIRE: dict[torch.dtype, v1.DType] = {torch.float32: v1.FLOAT32, torch.float64: v1.FLOAT64}
_FROM_WIRE: dict[int, torch.dtype] = {int(wire): dtype for dtype, wire in _TO_WIRE.items()}


def to_wire(dtype: torch.dtype) -> v1.DType:
    """The wire value of a torch dtype.

    Raises:
        ConfigError: vectors of this dtype cannot be exchanged.
    """
    wire = _TO_WIRE.get(dtype)
    if wire is None:
        known = " or ".join(str(d) for d in _TO_WIRE)
        raise ConfigError(
            f"a vector of dtype {dtype} cannot be sent; expected {known}: convert it with Tensor.to"
        )
    return wire


def from_wire(wire: int) -> torch.dtype | None:
    """The torch dtype of a wire value; None for an unknown value."""
    return _FROM_WIRE.get(wire)


def itemsize_bytes(wire: int) -> int:
    """Bytes per element of a wire dtype; 0 for an unknown value."""
    dtype = _FROM_WIRE.get(wire)
    return dtype.itemsize if dtype is not None else 0
