"""`Places`: increasing places in rows of equal length, in little more than the bits that they cannot do without."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradstream.errors import DataError


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
