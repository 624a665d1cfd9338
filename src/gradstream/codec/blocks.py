"""`Blocks`: a few bits for each number, and a scale for each block of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from gradstream.codec.base import (
    NO_STATE,
    TILE_ELEMS,
    BuiltIn,
    State,
    as_codes,
    pack,
    packed_bytes,
    tiles,
    unpack,
)
from gradstream.errors import ConfigError

_BITS = {"int8": 8, "int4": 4, "float4": 4}

_EXPONENT_BITS, _SMALLEST = 23, 120
"""Place of float32's exponent, and that of 2^-7, one less than float4's smallest."""


@dataclass(frozen=True, slots=True)
class Blocks(BuiltIn):
    """Each number as one of 255, or 15, between -m and m: m is the largest absolute value of its block.

    ::

        int8      q = round(127 · x / m)        x ≈ m / 127 · q         1 + 4/block bytes an element
        int4      q = round(7 · x / m)          x ≈ m / 7 · q           1/2 + 4/block
        float4    ± 1/64, 1/32, ... 1, the nearest to x / m             1/2 + 4/block       ± 0 below 3/256

    Within a block, int8 and int4 have an error of up to m/254 and m/14, whatever the number. That of float4 is up to a
    third of the number, and m/85: gradients have many small numbers. Numbers are rounded to the nearest, and those of
    float4 between 2/256 and 3/256 to 0. So means over many steps are biased unless `ErrorFeedback` is around it.

    Args:
        kind: "int8", "int4", or "float4" (sign and three bits of exponent, E3M0).
        block: elements of a block, at least 8 and a power of 2.

    Raises:
        ConfigError: another kind, or another block.

    Reference:
        Blocks of one scale: Dettmers, 8-bit approximations for parallelism in deep learning, 2016. E3M0 for outer
        gradients: Douillard and others, Streaming DiLoCo with overlapping communication, 2025.

    Example:
        >>> codec = gs.codecs.Blocks("int8")
        >>> codec.encoded_bytes(1024)
        1040
    """

    dense: ClassVar[bool] = True

    kind: Literal["int8", "int4", "float4"] = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        if self.kind not in _BITS:
            raise ConfigError(f"Blocks: kind is {self.kind!r}; expected {', '.join(map(repr, _BITS))}")
        if not 8 <= self.block <= TILE_ELEMS or self.block & (self.block - 1):
            raise ConfigError(f"Blocks: block is {self.block}; expected a power of 2 from 8 to {TILE_ELEMS}")

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return 4 * self._num_blocks(elems) + packed_bytes(elems, _BITS[self.kind])

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
    ) -> None:
        """See `Codec`."""
        del state, seed
        scales, codes = self._split(into, len(tensor))
        room = torch.empty(min(TILE_ELEMS, len(tensor)))
        for elems, blocks, places in tiles(len(tensor), self.block, _BITS[self.kind]):
            numbers = tensor[elems].view(blocks.stop - blocks.start, -1)
            shares = room[: numbers.numel()].view(numbers.shape)
            torch.amax(torch.abs(numbers, out=shares), dim=1, out=scales[blocks])
            inverse = torch.where(scales[blocks] > 0, scales[blocks].reciprocal(), 0.0)
            inverse = inverse.clamp_(max=torch.finfo(torch.float32).max).unsqueeze(1)
            self._encode(numbers, inverse, shares, codes[places])

    def _encode(
        self, numbers: torch.Tensor, inverse: torch.Tensor, shares: torch.Tensor, into: torch.Tensor
    ) -> None:
        """Writes the codes of numbers; `shares` holds their absolute values, and is overwritten."""
        if self.kind == "int8":
            torch.mul(numbers, inverse * 127, out=shares).round_()
            into.view(torch.int8).copy_(shares.view(-1))
        elif self.kind == "int4":
            torch.mul(numbers, inverse * 7, out=shares).round_().add_(8)
            pack(as_codes(shares), 4, into)
        else:  # a number goes up to 2^k from 3/4 of it on, where 4/3 of the number has the exponent k
            shares.mul_(inverse * (4 / 3))
            level = shares.view(torch.int32).bitwise_right_shift_(_EXPONENT_BITS).sub_(_SMALLEST).clamp_(0, 7)
            sign = numbers.view(torch.int32).bitwise_right_shift(28).bitwise_and_(8)
            pack(as_codes(level.bitwise_or_(sign)), 4, into)

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        scales, codes = self._split(encoded, len(into))
        for elems, blocks, places in tiles(len(into), self.block, _BITS[self.kind]):
            out, scale = into[elems].view(blocks.stop - blocks.start, -1), scales[blocks].unsqueeze(1)
            if self.kind == "int8":
                out.copy_(codes[places].view(torch.int8).view(out.shape)).mul_(scale * (1 / 127))
                continue
            code = unpack(codes[places], 4, out.numel()).view(out.shape)
            if self.kind == "int4":
                out.copy_(code.view(torch.int8)).sub_(8).mul_(scale * (1 / 7))
                continue
            bits = out.view(torch.int32).copy_(code.bitwise_and(7).view(torch.int8))
            bits.add_(_SMALLEST).bitwise_left_shift_(_EXPONENT_BITS)
            torch.threshold_(out, 2.0**-7, 0.0)
            bits.bitwise_or_(code.bitwise_and_(8).view(torch.int8).int().bitwise_left_shift_(28))
            out.mul_(scale)

    def _num_blocks(self, elems: int) -> int:
        return -(-elems // self.block)

    def _split(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = 4 * self._num_blocks(elems)
        return encoded[:scales].view(torch.float32), encoded[scales:]
