"""`QSGD`: each number rounded up or down at random, so that the mean is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.codec.base import NO_STATE
from gradstream.codec.bits import TILE_ELEMS, pack, packed_bytes, unpack
from gradstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class QSGD:
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

    linear: ClassVar[bool] = False
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

    @property
    def state_names(self) -> tuple[str, ...]:
        """None."""
        return ()

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return 4 * -(-elems // self.bucket) + packed_bytes(elems, self.bits)

    def encode(
        self,
        tensor: torch.Tensor,
        into: torch.Tensor,
        state: Mapping[str, torch.Tensor] = NO_STATE,
        *,
        seed: int = 0,
    ) -> None:
        """See `Codec`."""
        del state
        norms, codes = self._split(into, len(tensor))
        generator = torch.Generator().manual_seed(seed)
        whole = len(tensor) // self.bucket * self.bucket
        for start, stop in ((0, whole), (whole, len(tensor))):
            if start == stop:
                continue
            buckets = slice(start // self.bucket, -(-stop // self.bucket))
            numbers = tensor[start:stop].view(buckets.stop - buckets.start, -1)
            norm = torch.linalg.vector_norm(numbers, dim=1, out=norms[buckets])
            inverse = torch.where(norm > 0, self.levels / norm, 0.0).unsqueeze(1)
            level = torch.rand(numbers.shape, generator=generator).addcmul_(numbers.abs(), inverse)
            code = level.floor_().clamp_(max=self.levels).to(torch.uint8)
            code.add_(numbers.signbit().to(torch.uint8), alpha=self.levels + 1)
            pack(code.view(-1), self.bits, codes[start * self.bits // 8 : packed_bytes(stop, self.bits)])

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        norms, codes = self._split(encoded, len(into))
        code = unpack(codes, self.bits, len(into))
        positive = torch.arange(self.levels + 1, dtype=torch.float32) / self.levels
        torch.index_select(torch.cat((positive, -positive)), 0, code.int(), out=into)
        whole = len(into) // self.bucket * self.bucket
        into[:whole].view(-1, self.bucket).mul_(norms[: whole // self.bucket].unsqueeze(1))
        if whole < len(into):
            into[whole:].mul_(norms[-1])

    def _split(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor]:
        norms = 4 * -(-elems // self.bucket)
        return encoded[:norms].view(torch.float32), encoded[norms:]
