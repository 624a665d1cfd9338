"""The `Group`: ranks that combine their vectors, under one membership epoch, without a server.

Every rank calls the same operations in the same order, with spans of the same length; a group matches them by
this order. All ranks get the same bits, which depend on no timing.

If a rank dies or stays silent, the operation fails at every other rank within the deadline, with a
`PeerLostError` or a `DeadlineError` that names the rank. The group is then broken: every later operation raises
the same error. The contents of the operation's memory are undefined, so callers use only a returned result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from gradstream.errors import ConfigError, PeerLostError
from gradstream.memory import Span, Vector

# ---- group -------------------------------------------------------------------------------


def slice_of(elems: int, rank: int, size: int) -> tuple[int, int]:
    """[start, stop) of the slice of `elems` elements that `rank` of `size` owns.

    Edges are multiples of 64 elements where there are enough, since update rules round differently at
    unaligned cuts; slices differ by at most 64 elements, and the last ones may be empty.
    """
    blocks = -(-elems // 64)
    start, stop = blocks * rank // size * 64, blocks * (rank + 1) // size * 64
    return min(start, elems), min(stop, elems)


def own_slice(span: Span, rank: int, size: int) -> Span:
    """The `slice_of` a span that `rank` of `size` owns."""
    start, stop = slice_of(len(span), rank, size)
    return Span(span.vector, span.start + start, span.start + stop)


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The ranks of a group that is to be formed, and which of them this node is.

    Args:
        names: names of all nodes, by rank.
        epoch: membership epoch of the group; ranks of different epochs do not meet.
        silence_s: a rank that is silent for this long, now or later, counts as lost, in seconds.

    Raises:
        ConfigError: the rank does not exist, two names are equal, or the time is not positive.
    """

    names: Sequence[str]
    rank: int
    epoch: int
    silence_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.names) or len(set(self.names)) < len(self.names):
            names = ", ".join(self.names)
            raise ConfigError(
                f"got rank {self.rank} in the group {names}; expected different names, and a rank from 0 to "
                f"{len(self.names) - 1}"
            )
        if not self.silence_s > 0:
            raise ConfigError(f"silence_s = {self.silence_s}: expected a positive number")

    @property
    def me(self) -> str:
        """Name of this node."""
        return self.names[self.rank]


class Group(Protocol):
    """Ranks 0 to size-1 of one run, and their collective operations."""

    rank: int
    size: int
    names: Sequence[str]  # of the nodes, by rank
    shares_memory: bool  # `common` gives one vector for all ranks

    def allocate(self, elems: int, dtype: torch.dtype, name: str, *, lead_bytes: int = 0) -> Vector:
        """Allocates a vector of zeros in memory that suits this group best.

        Every rank allocates the same vectors in the same order. Operations take spans of other vectors, too;
        a group in shared memory copies those first.

        Args:
            elems: length of the vector.
            dtype: type of its elements.
            name: name of the vector, for messages.
            lead_bytes: distance of its first element from a multiple of 64 bytes, where the group can choose.
        """
        ...

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """A vector of zeros for contents that are the same at all ranks.

        A group that shares memory gives all ranks one vector; in other groups each rank gets its own. A rank
        writes only its own `slice_of` a span, while no other rank reads it, and then calls `all_gather` of
        the span, which moves nothing in a vector that all ranks share. Every rank asks for the same vectors,
        in the same order.

        Raises:
            PeerLostError, DeadlineError: the rank that makes the vector is gone or silent.
        """
        ...

    async def allreduce(self, span: Span, *, weight: float = 1.0) -> Span:
        """Sums up Σ_r weight_r · span_r over all ranks.

        Args:
            span: this rank's part; lent for reading and writing until the call returns. Its contents are
                undefined afterwards unless it is returned.
            weight: factor of this rank's part.

        Returns:
            The span that holds the sum: `span` itself, or memory of the group. For a vector that the group
            has allocated it can be read until the next operation on any of the same elements, so that
            buckets of one vector can be summed one after the other and read together. For any other vector
            it can be read until the next operation.

        Raises:
            PeerLostError, DeadlineError: names a rank; the group is broken.
        """
        ...

    async def reduce_scatter(self, span: Span, *, weight: float = 1.0) -> Span:
        """Sums up as `allreduce` does, but each rank gets only its own `slice_of` the sum."""
        ...

    async def all_gather(self, span: Span) -> None:
        """Sends each rank's own `slice_of` the span to every rank. Afterwards all ranks have the whole in `span`."""
        ...

    async def broadcast(self, span: Span, *, root: int = 0) -> None:
        """Copies the span of rank `root` into the spans of all other ranks."""
        ...

    def abandon(self, error: PeerLostError) -> None:
        """Breaks the group: somebody else has found out that `error.peer` is gone.

        Operations in progress and later ones raise, here and at all other ranks.
        """
        ...

    async def close(self) -> None:
        """Leaves the group and releases what it holds. Ranks that wait for this one fail. Idempotent."""
        ...


@runtime_checkable
class SwappingGroup(Group, Protocol):
    """A group of processes that send each other messages: they can also send each one something else."""

    async def all_to_all(self, span: Span) -> None:
        """Sends slice s of the span to rank s, and puts the slice that rank s has for this one into its place.

        Args:
            span: its `slice_of` slices have the same length for all ranks.

        Raises:
            PeerLostError, DeadlineError: names a rank; the group is broken.
        """
        ...


# ---- buckets -----------------------------------------------------------------------------
# The buckets of a run without servers: how the flat vector is divided, and which worker owns which part.


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
