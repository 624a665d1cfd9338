"""The buckets of a run without servers: how the flat vector is divided, and which worker owns which part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradstream.collectives.group import slice_of


@dataclass(frozen=True, slots=True)
class Buckets:
    """Bucket b is elements [b·n, min((b+1)·n, elems)) of the flat vector, and rank r owns its slice r.

    Args:
        elems: length of the flat vector.
        bucket_elems: n, a multiple of 64, since update rules round differently at other cuts.
        size: number of ranks.
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
        """[start, stop) of the part of a bucket that a rank owns, in the flat vector; may be empty."""
        start, stop = slice_of(bucket[1] - bucket[0], rank, self.size)
        return bucket[0] + start, bucket[0] + stop

    @property
    def first_held(self) -> int:
        """First element of the trailing buckets in which every rank owns something that owns anything."""
        owners = [rank for rank in range(self.size) if self.owned(rank)]
        for bucket in reversed(self.bounds):
            if all(self.owned(rank)[-1][1] > bucket[0] for rank in owners):
                return bucket[0]
        return 0

    def owned(self, rank: int) -> Sequence[tuple[int, int]]:
        """All slices that a rank owns, in the order of the vector. Those of all ranks cover the whole."""
        slices = (self.slice_in(bucket, rank) for bucket in self.bounds)
        return [(start, stop) for start, stop in slices if start < stop]
