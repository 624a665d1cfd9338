"""`DCT`: the largest coefficients of each chunk's cosine transform."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from gradstream.codec.base import NO_STATE, BuiltIn, State
from gradstream.errors import ConfigError, DataError


@functools.cache
def cosines(size: int) -> torch.Tensor:
    """(size, size), orthogonal: row i has the i-th cosine of the discrete transform of type II."""
    place = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(math.pi / size * (place + 0.5) * place.unsqueeze(1)) * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return rows.float()


@dataclass(frozen=True, slots=True)
class DCT(BuiltIn):
    """Of each chunk the k coefficients of largest absolute value of its discrete cosine transform: 5k bytes a chunk.

    What neighbours have in common is in few coefficients. Within `ErrorFeedback` the rest waits, as in DeMo's
    decoupled momentum; there, the receiver takes signs besides (`optimizer` is the run's own here).

    Args:
        k: coefficients of a chunk that are sent, a multiple of 4.
        chunk: elements of a chunk, at least k, and up to 256.

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        Peng, Quesnelle, Kingma, DeMo: decoupled momentum optimization, 2024.
    """

    k: int = 4
    chunk: int = 64

    def __post_init__(self) -> None:
        if self.k < 4 or self.k % 4:
            raise ConfigError(f"DCT: k is {self.k}; expected a multiple of 4, up to chunk={self.chunk}")
        if not self.k <= self.chunk <= 256:
            raise ConfigError(f"DCT: chunk is {self.chunk}; expected at least k={self.k}, and up to 256")

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`. The last chunk counts as a whole one."""
        return -(-elems // self.chunk) * 5 * self.k

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
    ) -> None:
        """See `Codec`."""
        del state, seed
        values, places = self._split(into, len(tensor))
        rows = torch.nn.functional.pad(tensor, (0, -len(tensor) % self.chunk)).view(-1, self.chunk)
        coefficients = rows @ cosines(self.chunk).T
        found = torch.topk(coefficients.abs(), self.k, dim=1, sorted=False).indices
        values.copy_(coefficients.gather(1, found))
        places.copy_(found)

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        values, places = self._split(encoded, len(into))
        where = places.long()
        if len(where) and int(where.max()) >= self.chunk:
            raise DataError(f"a coefficient {int(where.max())}; expected 0 to {self.chunk - 1}")
        coefficients = torch.zeros(len(where), self.chunk).scatter_(1, where, values)
        into.copy_((coefficients @ cosines(self.chunk)).view(-1)[: len(into)])

    def _split(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor]:
        chunks = -(-elems // self.chunk)
        return (
            encoded[: 4 * self.k * chunks].view(torch.float32).view(chunks, self.k),
            encoded[4 * self.k * chunks :].view(chunks, self.k),
        )
