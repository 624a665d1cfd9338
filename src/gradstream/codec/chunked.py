"""`ChunkTopK`: the largest numbers of each chunk, in two bits each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.codec.base import NO_STATE
from gradstream.codec.bits import as_codes, pack, packed_bytes, unpack
from gradstream.errors import ConfigError, DataError

BITS = 2


@dataclass(frozen=True, slots=True)
class ChunkTopK:
    """Of each chunk the k numbers of largest absolute value, as one of ±m, ±m/3: m is the largest of them.

    2k + k/4 + 4 bytes a chunk: places within a chunk take two bytes. With `ErrorFeedback(..., decay=0.95)` around it,
    on outer gradients, it is SparseLoCo's way of sending.

    Args:
        k: numbers of a chunk that are sent, a multiple of 4.
        chunk: elements of a chunk, at least k, and up to 32768.

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        Sarfi, Thérien, Lidin, Belilovsky, Communication efficient LLM pre-training with SparseLoCo, 2025.

    Example:
        >>> gs.codecs.ChunkTopK(k=64, chunk=4096).encoded_bytes(4096)
        148
    """

    linear: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ()
    unbiased: ClassVar[bool] = False

    k: int = 64
    chunk: int = 4096

    def __post_init__(self) -> None:
        if self.k < 4 or self.k % 4:
            raise ConfigError(f"ChunkTopK: k is {self.k}; expected a multiple of 4, up to chunk={self.chunk}")
        if not self.k <= self.chunk <= 1 << 15:
            raise ConfigError(
                f"ChunkTopK: chunk is {self.chunk}; expected at least k={self.k}, and up to {1 << 15}"
            )

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`. The last chunk counts as a whole one."""
        return self._num_chunks(elems) * (4 + 2 * self.k + packed_bytes(self.k, BITS))

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
        scales, places, codes = self._split(into, len(tensor))
        rows = self._rows(tensor)
        found = torch.topk(rows.abs(), self.k, dim=1)
        scales.copy_(found.values[:, 0])
        places.copy_(found.indices)
        values = rows.gather(1, found.indices)
        large = found.values * 3 > 2 * found.values[:, :1]  # nearer to m than to m/3
        pack(as_codes(large.to(torch.int8).mul_(2).add_(values.signbit())), BITS, codes)

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        scales, places, codes = self._split(encoded, len(into))
        where = places.long()
        if len(where) and (int(where.min()) < 0 or int(where.max()) >= self.chunk):
            raise DataError(
                f"an element at {int(where.max())} of a chunk; expected places from 0 to {self.chunk - 1}"
            )
        numbers = torch.tensor([1 / 3, -1 / 3, 1.0, -1.0])
        values = numbers[unpack(codes, BITS, where.numel()).int()].view(where.shape) * scales.unsqueeze(1)
        rows = torch.zeros(len(scales), self.chunk).scatter_(1, where, values)
        into.copy_(rows.view(-1)[: len(into)])

    def _num_chunks(self, elems: int) -> int:
        return -(-elems // self.chunk)

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The chunks, the last one filled up with zeros."""
        missing = -len(tensor) % self.chunk
        return torch.nn.functional.pad(tensor, (0, missing)).view(-1, self.chunk)

    def _split(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chunks = self._num_chunks(elems)
        scales, places = 4 * chunks, 2 * self.k * chunks
        return (
            encoded[:scales].view(torch.float32),
            encoded[scales : scales + places].view(torch.int16).view(chunks, self.k),
            encoded[scales + places :],
        )
