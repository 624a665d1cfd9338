"""`ChunkTopK`: the largest numbers of each chunk, in two bits each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gradstream.codec.base import NO_STATE, TILE_ELEMS, BuiltIn, State, as_codes, pack, packed_bytes, unpack
from gradstream.errors import ConfigError, DataError

# ---- places ------------------------------------------------------------------------------
# `Places`: increasing places in rows of equal length, in little more than the bits that they cannot do without.


@dataclass(frozen=True, slots=True)
class Places:
    """Up to k increasing places in each row of some elements, encoded as Elias and Fano do.

    The low l = ⌊lg(length / k)⌋ bits of a place are sent as they are. Of the high ones, place i sends a 1 at bit
    high + i of a row of bits. So a row takes k·l bits, and k + length / 2^l others, each rounded up to bytes. With
    k = 64 of 4096 that is 8 bits a place, and no code has fewer than 7.4: lg of the number of choices, over 64.

    Args:
        k: places in a row.
        length: elements of a row, at least k.

    Reference:
        Elias, Efficient storage and retrieval by content and address of static files, 1974; Fano, 1971.

    Example:
        >>> Places(k=64, length=4096).row_bytes
        64
    """

    k: int
    length: int

    @property
    def low_bits(self) -> int:
        """Bits of a place that are sent as they are, l."""
        return (self.length // self.k).bit_length() - 1

    @property
    def _low_bytes(self) -> int:
        return -(-self.k * self.low_bits // 8)

    @property
    def _high_bytes(self) -> int:
        return -(-(self.k + ((self.length - 1) >> self.low_bits)) // 8)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's places."""
        return self._low_bytes + self._high_bytes

    def write(self, places: NDArray[np.int64], there: NDArray[np.bool_], into: NDArray[np.uint8]) -> None:
        """Encodes places.

        Args:
            places: (rows, k) int64, in [0, length), increasing in each row.
            there: (rows, k), true for those of a row that it has: the first ones.
            into: (rows · row_bytes,) uint8, overwritten: all low bits, then all high ones.
        """
        rows, bits = len(places), self.low_bits
        lows, highs = into[: rows * self._low_bytes], into[rows * self._low_bytes :]
        if bits:
            wide = (places[:, :, None] >> np.arange(bits)).astype(np.uint8)
            wide &= there[:, :, None]
            lows[:] = np.packbits(wide.reshape(rows, -1), axis=1, bitorder="little").ravel()
        marks = np.zeros((rows, 8 * self._high_bytes), np.uint8)
        at = (places >> bits) + np.arange(self.k)
        if there.all():
            np.put_along_axis(marks, at, 1, axis=1)
        else:
            marks[np.nonzero(there)[0], at[there]] = 1
        highs[:] = np.packbits(marks, axis=1, bitorder="little").ravel()

    def read(self, encoded: NDArray[np.uint8], rows: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The places, (rows, k) int64, and which of them are there, as for `write`.

        Raises:
            DataError: a row has more places than k, or they are not increasing, or end beyond the row.
        """
        bits = self.low_bits
        lows = encoded[: rows * self._low_bytes].reshape(rows, self._low_bytes)
        highs = encoded[rows * self._low_bytes :].reshape(rows, self._high_bytes)
        marks = np.unpackbits(highs, axis=1, bitorder="little")
        counts = marks.sum(axis=1, dtype=np.int64)
        if (counts > self.k).any():
            row = int((counts > self.k).argmax())
            raise DataError(f"chunk {row} has {counts[row]} places; expected up to {self.k}")
        there = np.arange(self.k) < counts[:, None]
        places = np.zeros((rows, self.k), np.int64)
        places[there] = np.flatnonzero(marks) % marks.shape[1]
        places -= np.arange(self.k)
        if bits:
            wide = np.unpackbits(lows, axis=1, count=self.k * bits, bitorder="little")
            places <<= bits
            places |= wide.reshape(rows, self.k, bits) @ (1 << np.arange(bits))
        falls = (np.diff(places, axis=1) <= 0) & there[:, 1:]
        if (places[there] >= self.length).any() or falls.any():
            raise DataError(f"places of a chunk are not increasing numbers from 0 to {self.length - 1}")
        return places, there


# ---- chunked -----------------------------------------------------------------------------

BITS = 2
NUMBERS = (1 / 3, -1 / 3, 1.0, -1.0)
"""By code, in the scale of the chunk."""


@dataclass(frozen=True, slots=True)
class ChunkTopK(BuiltIn):
    """The k numbers of largest absolute value m of each chunk, each rounded to the nearest of 0, ±m/3, ±m.

    So no decoded number is farther from the original than 0 is, and zeros are not sent.
    A chunk takes 4 bytes for m, k/4 for codes, and what `Places` says: with the defaults one byte for each place. With
    `ErrorFeedback(..., decay=0.95)` around it, on outer gradients, it is SparseLoCo's way of sending.

    Args:
        k: numbers of a chunk that are sent, a multiple of 4.
        chunk: elements of a chunk, at least k, and up to 32768.

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        Sarfi, Thérien, Lidin, Belilovsky, Communication efficient LLM pre-training with SparseLoCo, 2025. There, a
        place takes 12 bits.

    Example:
        >>> gs.codecs.ChunkTopK(k=64, chunk=4096).encoded_bytes(4096)
        84
    """

    k: int = 64
    chunk: int = 4096

    def __post_init__(self) -> None:
        if {type(self.k), type(self.chunk)} != {int}:
            raise ConfigError(f"ChunkTopK: k={self.k!r}, chunk={self.chunk!r}; expected whole numbers")
        if self.k < 4 or self.k % 4:
            raise ConfigError(f"ChunkTopK: k is {self.k}; expected a multiple of 4, up to chunk={self.chunk}")
        if not self.k <= self.chunk <= 1 << 15:
            raise ConfigError(
                f"ChunkTopK: chunk is {self.chunk}; expected at least k={self.k}, and up to {1 << 15}"
            )

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`. The last chunk counts as a whole one."""
        chunk_bytes = 4 + self._places.row_bytes + packed_bytes(self.k, BITS)
        return self._num_chunks(elems) * chunk_bytes

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
    ) -> None:
        """See `Codec`."""
        del state, seed
        scales, places, codes = self._split(into, len(tensor))
        if not len(scales):
            return
        found = np.empty((len(scales), self.k), np.int64)
        values = np.empty((len(scales), self.k), np.float32)
        step = max(1, TILE_ELEMS // self.chunk)
        for start in range(0, len(scales), step):
            tile = slice(start, start + step)
            rows = self._rows(tensor[start * self.chunk : (start + step) * self.chunk])
            found[tile] = _largest(rows, self.k)
            values[tile] = np.take_along_axis(rows, found[tile], axis=1)
        sizes = np.abs(values)
        most = sizes.max(axis=1)
        scales.numpy()[:] = most
        there = sizes > most[:, None] / 6  # nearer to m/3 than to 0
        if not there.all():  # those that are come first
            order = np.argsort(~there, axis=1, kind="stable")
            found, values, sizes, there = (
                np.take_along_axis(one, order, axis=1) for one in (found, values, sizes, there)
            )
        self._places.write(found, there, places.numpy())
        large = sizes > most[:, None] * np.float32(2 / 3)  # nearer to m than to m/3
        numbers = 2 * large.astype(np.int8) + np.signbit(values)
        pack(as_codes(torch.from_numpy(numbers)), BITS, codes)

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        places, values = self.entries(encoded, len(into))
        into.zero_()
        into[places] = values

    def entries(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SparseCodec`."""
        scales, places, codes = self._split(encoded, elems)
        chunks = len(scales)
        found, kept = self._places.read(places.numpy(), chunks)
        where, there = torch.from_numpy(found), torch.from_numpy(kept)
        where += torch.arange(chunks).unsqueeze(1) * self.chunk
        numbers = torch.tensor(NUMBERS)[unpack(codes, BITS, where.numel()).int()]
        values = numbers.view(where.shape) * scales.unsqueeze(1)
        if kept.all() and not elems % self.chunk:
            return where.view(-1), values.view(-1)
        inside = there & (where < elems)
        return where[inside], values[inside]

    @property
    def _places(self) -> Places:
        return Places(self.k, self.chunk)

    def _rows(self, tensor: torch.Tensor) -> NDArray[np.float32]:
        """The chunks, the last one filled up with zeros."""
        missing = -len(tensor) % self.chunk
        whole = torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
        rows: NDArray[np.float32] = whole.view(-1, self.chunk).numpy()
        return rows

    def _num_chunks(self, elems: int) -> int:
        return -(-elems // self.chunk)

    def _split(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chunks = self._num_chunks(elems)
        if len(encoded) != self.encoded_bytes(elems):
            raise DataError(
                f"{len(encoded)} bytes for {elems} elements; expected {self.encoded_bytes(elems)}"
            )
        scales, places = 4 * chunks, self._places.row_bytes * chunks
        return (
            encoded[:scales].view(torch.float32),
            encoded[scales : scales + places],
            encoded[scales + places :],
        )


def _largest(rows: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Places of the k numbers of largest absolute value in each row, (rows, k), in order.

    NumPy's partition is six times as fast as torch's `topk` where the processor has AVX512.
    """
    sizes = np.abs(rows)
    length = sizes.shape[1]
    threshold = np.partition(sizes, length - k, axis=1)[:, length - k, None]
    large = sizes >= threshold
    places, found = np.flatnonzero(large), np.empty((len(rows), k), np.int64)
    if len(places) == found.size:
        np.remainder(places.reshape(found.shape), length, out=found)
        return found
    for row, several in enumerate(large):  # some are equal to the threshold, and not all of them have room
        surely = np.flatnonzero(sizes[row] > threshold[row])
        equal = np.flatnonzero(several & (sizes[row] == threshold[row]))
        found[row] = np.sort(np.concatenate((surely, equal[: k - len(surely)])))
    return found
