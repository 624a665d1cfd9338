"""`Cast`: float32 rounded to two bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.codec.base import NO_STATE, BuiltIn, State
from gradstream.errors import ConfigError

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes of two bytes, by name."""


@dataclass(frozen=True, slots=True)
class Cast(BuiltIn):
    """Each number rounded to the nearest one of two bytes: 2 bytes an element.

    bfloat16 keeps 8 binary digits, of all that float32 holds. float16 keeps 11 digits of numbers from 6e-5 to 65504;
    smaller ones lose digits, larger ones become infinite, and a gradient with one of these is refused where it arrives.

    Args:
        dtype: "bfloat16" or "float16".

    Raises:
        ConfigError: another dtype.

    Example:
        >>> codec, into = gs.codecs.Cast(), torch.empty(4, dtype=torch.uint8)
        >>> codec.encode(torch.tensor([1.0, 1.001]), into)
        >>> decoded = torch.empty(2)
        >>> codec.decode(into, decoded)
        >>> decoded
        tensor([1., 1.])
    """

    dense: ClassVar[bool] = True

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"Cast: dtype is {self.dtype!r}; expected {' or '.join(map(repr, DTYPES))}")

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return 2 * elems

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
    ) -> None:
        """See `Codec`."""
        del state, seed
        into.view(DTYPES[self.dtype]).copy_(tensor)

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        into.copy_(encoded.view(DTYPES[self.dtype]))
