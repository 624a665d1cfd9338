"""The buckets of a run without servers: how the flat vector is cut, and which worker owns what of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradstream.collectives.group import slice_of

__all__ = ["Buckets"]


@dataclass(frozen=True, slots=True)
class Buckets:
    """Bucket b is elements [b·n, min((b+1)·n, elems)) of the flat vector, and rank r owns its slice r.

    Args:
        elems: length of the flat vector.
        bucket_elems: n, a multiple of 64: update rules round differently at other cuts.
        size: how many ranks there are.
    """

    elems: int
    bucket_elems: int
    size: int

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """[start, stop) of each bucket, in the order of the vector; the last may be short."""
        starts = range(0, self.elems, self.bucket_elems)
        return [(start, min(start + self.bucket_elems, self.elems)) for start in starts]

    def slice_in(self, bucket: tuple[int, int], rank: int) -> tuple[int, int]:
        """[start, stop) of what a rank owns of a bucket, in the flat vector; may be empty."""
        start, stop = slice_of(bucket[1] - bucket[0], rank, self.size)
        return bucket[0] + start, bucket[0] + stop

    def owned(self, rank: int) -> Sequence[tuple[int, int]]:
        """Everything that a rank owns, in the order of the vector. All ranks' together are the whole."""
        slices = (self.slice_in(bucket, rank) for bucket in self.bounds)
        return [(start, stop) for start, stop in slices if start < stop]
