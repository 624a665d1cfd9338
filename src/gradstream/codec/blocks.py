"""`Blocks`: a few bits for each number, and a scale for each block of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from gradstream.codec.base import NO_STATE
from gradstream.codec.bits import TILE_ELEMS, pack, packed_bytes, unpack
from gradstream.errors import ConfigError

_BITS = {"int8": 8, "int4": 4, "float4": 4}

_LEVELS = torch.tensor([0.0, *(2.0**-k for k in range(6, -1, -1))])
"""The numbers of float4 between 0 and 1: three bits of exponent, none of mantissa."""

_BETWEEN = (_LEVELS[1:] + _LEVELS[:-1]) / 2


@dataclass(frozen=True, slots=True)
class Blocks:
    """Each number as one of 255, or 15, between -m and m: m is the largest absolute value of its block.

    ::

        int8      q = round(127 · x / m)        x ≈ m / 127 · q         1 + 4/block bytes an element
        int4      q = round(7 · x / m)          x ≈ m / 7 · q           1/2 + 4/block
        float4    ± 0, 1/64, 1/32, ... 1, the nearest to x / m          1/2 + 4/block

    Within a block, int8 and int4 have an error of up to m/254 and m/14, whatever the number. That of float4 is up to a
    third of the number, and m/128: gradients have many small numbers. Numbers are rounded to the nearest, so means over
    many steps are biased unless `ErrorFeedback` is around it.

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

    linear: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False

    kind: Literal["int8", "int4", "float4"] = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        if self.kind not in _BITS:
            raise ConfigError(f"Blocks: kind is {self.kind!r}; expected {', '.join(map(repr, _BITS))}")
        if not 8 <= self.block <= TILE_ELEMS or self.block & (self.block - 1):
            raise ConfigError(f"Blocks: block is {self.block}; expected a power of 2 from 8 to {TILE_ELEMS}")

    @property
    def state_names(self) -> tuple[str, ...]:
        """None."""
        return ()

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return 4 * self._num_blocks(elems) + packed_bytes(elems, _BITS[self.kind])

    def encode(
        self,
        tensor: torch.Tensor,
        into: torch.Tensor,
        state: Mapping[str, torch.Tensor] = NO_STATE,
        *,
        seed: int = 0,
    ) -> None:
        """See `Codec`."""
        del state, seed
        scales, codes = self._split(into, len(tensor))
        for elems, blocks, places in self._tiles(len(tensor)):
            numbers = tensor[elems].view(blocks.stop - blocks.start, -1)
            largest = torch.linalg.vector_norm(numbers, ord=float("inf"), dim=1, out=scales[blocks])
            inverse = torch.where(largest > 0, largest.reciprocal(), 0.0).clamp_(
                max=torch.finfo(torch.float32).max
            )
            self._encode(numbers, inverse.unsqueeze(1), codes[places])

    def _encode(self, numbers: torch.Tensor, inverse: torch.Tensor, into: torch.Tensor) -> None:
        shares = numbers * inverse  # in [-1, 1]
        if self.kind == "int8":
            into.view(torch.int8).copy_(shares.mul_(127).round_().view(-1))
        elif self.kind == "int4":
            pack(shares.mul_(7).round_().add_(8).to(torch.uint8).view(-1), 4, into)
        else:
            level = torch.bucketize(shares.abs(), _BETWEEN, out_int32=True).to(torch.uint8)
            pack(level.add_(shares.signbit().to(torch.uint8), alpha=8).view(-1), 4, into)

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        scales, codes = self._split(encoded, len(into))
        for elems, blocks, places in self._tiles(len(into)):
            out = into[elems].view(blocks.stop - blocks.start, -1)
            size = out.numel()
            if self.kind == "int8":
                out.copy_(codes[places].view(torch.int8).view(out.shape)).mul_(1 / 127)
            elif self.kind == "int4":
                out.copy_(unpack(codes[places], 4, size).view(out.shape)).sub_(8).mul_(1 / 7)
            else:
                numbers = torch.cat((_LEVELS, -_LEVELS))
                torch.index_select(numbers, 0, unpack(codes[places], 4, size).int(), out=out.view(-1))
            out.mul_(scales[blocks].unsqueeze(1))

    def _num_blocks(self, elems: int) -> int:
        return -(-elems // self.block)

    def _split(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = 4 * self._num_blocks(elems)
        return encoded[:scales].view(torch.float32), encoded[scales:]

    def _tiles(self, elems: int) -> Iterator[tuple[slice, slice, slice]]:
        """Whole blocks, some at a time, and then what is left: elements, blocks, and bytes of codes."""
        whole, bits = elems // self.block * self.block, _BITS[self.kind]
        starts = [*range(0, whole, TILE_ELEMS), *([whole] if whole < elems else [])]
        for start in starts:
            stop = min(start + TILE_ELEMS, whole) if start < whole else elems
            yield (
                slice(start, stop),
                slice(start // self.block, -(-stop // self.block)),
                slice(start * bits // 8, packed_bytes(stop, bits)),
            )
