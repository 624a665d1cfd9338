"""`QSGD`: each number rounded up or down at random, so that the mean is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
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

_SAFE_NORM = 1e-15, 1e18
"""Norms between which float32 holds the squares that they are made of."""

_LEAST_NORM = 1e-36
"""Below it the quotient of level and norm is not a number of float32: the bucket is sent as zeros."""


@dataclass(frozen=True, slots=True)
class QSGD(BuiltIn):
    """Levels between 0 and the norm of a bucket, drawn so that the mean is the number itself.

    ::

        x ≈ ‖bucket‖ · sign(x) · l / s,     l = ⌊s · |x| / ‖bucket‖ + u⌋,  u uniform in [0, 1)
        s = 2^(bits - 1) - 1                        bits/8 + 4/bucket bytes an element

    The mean over all draws is x, and the variance of a bucket of n numbers at most min(n/s², √n/s) · ‖bucket‖².

    Args:
        bits: 2, 4 or 8: one for the sign, the others for the level. The paper's codes of variable length are smaller;
            here the size is known beforehand.
        bucket: elements of a bucket, at least 8.

    Raises:
        ConfigError: other bits, or a smaller bucket.

    Reference:
        Alistarh, Grubic, Li, Tomioka, Vojnovic, QSGD: communication-efficient SGD via gradient quantization and
        encoding, 2017.
    """

    dense: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True

    bits: int = 4
    bucket: int = 512

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ConfigError(f"QSGD: bits is {self.bits!r}; expected 2, 4 or 8")
        if not 8 <= self.bucket <= TILE_ELEMS or self.bucket % 8:
            raise ConfigError(f"QSGD: bucket is {self.bucket!r}; expected a multiple of 8 up to {TILE_ELEMS}")

    @property
    def levels(self) -> int:
        """S."""
        return (1 << self.bits - 1) - 1

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return 4 * -(-elems // self.bucket) + packed_bytes(elems, self.bits)

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
    ) -> None:
        """See `Codec`."""
        del state
        norms, codes = self._split(into, len(tensor))
        generator = np.random.Generator(np.random.SFC64(seed))
        for elems, buckets, places in tiles(len(tensor), self.bucket, self.bits):
            numbers = tensor[elems].view(buckets.stop - buckets.start, -1)
            norm = torch.linalg.vector_norm(numbers, dim=1, out=norms[buckets])
            if norm.max() > _SAFE_NORM[1] or norm.min() < _SAFE_NORM[0]:  # squares may be beyond float32
                wide = torch.linalg.vector_norm(numbers, dim=1, dtype=torch.float64)
                norm.copy_(wide.clamp_(max=torch.finfo(torch.float32).max))
            inverse = torch.where(norm > _LEAST_NORM, self.levels / norm, 0.0).unsqueeze(1)
            # Uniform in 65,536 steps, and so fair to 1e-5 of a level.
            draws = generator.integers(1 << 16, size=numbers.shape, dtype=np.uint16)
            level = torch.from_numpy(draws.astype(np.float32)).add_(0.5).mul_(2.0**-16)
            level.addcmul_(numbers.abs(), inverse).floor_().clamp_(max=self.levels).copysign_(numbers)
            if self.bits == 8:
                codes[places].view(torch.int8).copy_(level.view(-1))
            else:
                pack(as_codes(level.add_(self.levels)), self.bits, codes[places])

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        norms, codes = self._split(encoded, len(into))
        for elems, buckets, places in tiles(len(into), self.bucket, self.bits):
            out = into[elems].view(buckets.stop - buckets.start, -1)
            code = unpack(codes[places], self.bits, out.numel()).view(torch.int8)
            out.copy_(code.view(out.shape)).sub_(0 if self.bits == 8 else self.levels)
            out.mul_(norms[buckets].unsqueeze(1) / self.levels)

    def _split(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor]:
        norms = 4 * -(-elems // self.bucket)
        return encoded[:norms].view(torch.float32), encoded[norms:]
