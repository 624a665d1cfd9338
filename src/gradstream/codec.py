"""Codecs: how tensors are made smaller for their way between two processes, and whole again behind it.

The encoded size follows from the number of elements alone, so that both sides have the memory beforehand.
"""

from __future__ import annotations

from typing import Protocol

import torch

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes of two bytes, by name."""


class Codec(Protocol):
    """Encodes tensors of one dtype.

    Attributes:
        dtype: dtype of the tensors.
    """

    dtype: torch.dtype

    def encoded_bytes(self, elems: int) -> int:
        """The size in bytes of so many encoded elements."""
        ...

    def encode(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Encodes elements.

        Args:
            tensor: (elems,), of `dtype`.
            into: (`encoded_bytes(elems)`,) uint8, overwritten. It begins at a multiple of 8 bytes.
        """
        ...

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """Overwrites `into`, (elems,) of `dtype`, with what `encode` has been given, or nearly that."""
        ...


class CastCodec:
    """Implements `Codec`: float32 rounded to the nearest number of two bytes.

    float16 keeps 11 binary digits of numbers from 6e-5 to 65504; smaller ones lose digits, larger ones become
    infinite. bfloat16 keeps 8 digits, of all that float32 holds.

    Args:
        name: one of DTYPES.
    """

    dtype = torch.float32

    def __init__(self, name: str) -> None:
        self._narrow = DTYPES[name]

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return elems * self._narrow.itemsize

    def encode(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        into.view(self._narrow).copy_(tensor)

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        into.copy_(encoded.view(self._narrow))
