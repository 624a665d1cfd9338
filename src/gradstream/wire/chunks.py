"""The chunk map: it divides the flat vector into chunks, and assigns them to shards.

A chunk is the unit of flow control, update, version and de-duplication. Its edges lie at multiples of 64 elements,
because fused update kernels round differently at unaligned edges. Shards get chunks in turn, so that a backprop,
which fills the gradient from one end, keeps all shards busy.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.errors import ConfigError
from gradstream.wire.frames import MAX_PAYLOAD_BYTES

ALIGNMENT_ELEMS = 64

CHUNK_ELEMS = 1 << 18
"""Default length of a chunk: 1 MiB of float32."""

MAX_CHUNK_ELEMS = MAX_PAYLOAD_BYTES // 8
"""Largest length of a chunk: this number of float64 elements fills a frame."""

SHARED_CHUNK_BYTES = 16 << 20
SHARED_CHUNKS = 16


def shared_chunk_elems(elems: int, itemsize_bytes: int, num_shards: int) -> int:
    """The length of a chunk where all nodes exchange through shared memory: n = 2^k, at least 2^18 elements.

    Shared memory copies nothing, so a chunk costs the same work on both sides, whatever its length. n is the largest
    power of two with n · 16 · S <= `elems`, so that each shard has 16 chunks and can overlap updates with a
    backprop; and with at most 16 MiB.

    Args:
        elems: length of the flat vector.
        itemsize_bytes: size of an element, in bytes.
        num_shards: S, the number of shards, at least 1.
    """
    most = min(elems // (SHARED_CHUNKS * num_shards), SHARED_CHUNK_BYTES // itemsize_bytes)
    return max(CHUNK_ELEMS, 1 << most.bit_length() >> 1)


def parted_chunk_elems(elems: int, parts: int) -> int:
    """The largest length of a chunk with which a vector of so many elements has a chunk for each of some parts.

    Vectors of fewer than 64·parts² elements may have fewer chunks, since chunks end at multiples of 64.
    """
    return max(1, -(-elems // (ALIGNMENT_ELEMS * parts))) * ALIGNMENT_ELEMS


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """Chunk c is elements [c·n, min((c+1)·n, elems)) of the vector, and lives on shard c mod S.

    Args:
        elems: length of the flat vector.
        chunk_elems: n, a multiple of 64, at most 4,194,304 (16 MiB of float32).
        num_shards: S, the number of shards, at least 1.
    """

    elems: int
    chunk_elems: int
    num_shards: int

    def __post_init__(self) -> None:
        if self.chunk_elems % ALIGNMENT_ELEMS or not 0 < self.chunk_elems <= MAX_CHUNK_ELEMS:
            raise ConfigError(
                f"chunk_elems = {self.chunk_elems}: expected a multiple of {ALIGNMENT_ELEMS} "
                f"from {ALIGNMENT_ELEMS} to {MAX_CHUNK_ELEMS}"
            )
        if self.num_shards < 1:
            raise ConfigError(f"servers = {self.num_shards}: expected at least 1")

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the vector."""
        return -(-self.elems // self.chunk_elems)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """[start, stop) of a chunk in the flat vector."""
        start = chunk * self.chunk_elems
        return start, min(start + self.chunk_elems, self.elems)

    def chunks_of(self, shard: int) -> range:
        """The chunks of a shard, in the order of the vector; none if there are more shards than chunks."""
        return range(shard, self.num_chunks, self.num_shards)

    def local_bounds(self, chunk: int) -> tuple[int, int]:
        """[start, stop) of a chunk in its shard's own vectors, which have no gaps."""
        start, stop = self.bounds(chunk)
        local = (chunk // self.num_shards) * self.chunk_elems
        return local, local + stop - start

    def shard_elems(self, shard: int) -> int:
        """Length of a shard's own vectors."""
        return sum(stop - start for start, stop in map(self.bounds, self.chunks_of(shard)))
