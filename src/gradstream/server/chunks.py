"""The chunk map: how the flat vector is cut, and which shard holds which cut.

A chunk is the unit of flow, application, version and de-duplication. Its edges lie at multiples
of 64 elements, because fused update kernels round differently at unaligned cuts. Chunks are dealt
to shards in turn, so that a backprop, which fills the vector from the front, keeps all shards busy.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.errors import ConfigError

__all__ = ["ALIGNMENT_ELEMS", "MAX_CHUNK_ELEMS", "ChunkMap"]

ALIGNMENT_ELEMS = 64
MAX_CHUNK_ELEMS = 1 << 20


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """Chunk c is elements [c·n, min((c+1)·n, elems)) of the vector, and lives on shard c mod S.

    Args:
        elems: length of the flat vector.
        chunk_elems: n, a multiple of 64, at most 1,048,576 (4 MiB of float32).
        num_shards: S.
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
        """How many chunks the vector has."""
        return -(-self.elems // self.chunk_elems)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """[start, stop) of a chunk in the flat vector."""
        start = chunk * self.chunk_elems
        return start, min(start + self.chunk_elems, self.elems)

    def chunks_of(self, shard: int) -> range:
        """The chunks of a shard, in the order of the vector. Empty if there are too few."""
        return range(shard, self.num_chunks, self.num_shards)

    def local_bounds(self, chunk: int) -> tuple[int, int]:
        """[start, stop) of a chunk in its shard's own vectors, which have no gaps."""
        start, stop = self.bounds(chunk)
        local = (chunk // self.num_shards) * self.chunk_elems
        return local, local + stop - start

    def shard_elems(self, shard: int) -> int:
        """Length of a shard's own vectors."""
        return sum(stop - start for start, stop in map(self.bounds, self.chunks_of(shard)))
