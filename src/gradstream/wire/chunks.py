"""The chunk map: it divides the flat vector into chunks, and assigns them to shards.

A chunk is the unit of flow control, update, version and de-duplication. Its edges lie at multiples of 64 elements,
because fused update kernels round differently at unaligned edges. Shards get chunks in turn, so that a backprop,
which fills the gradient from one end, keeps all shards busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gradstream.errors import ConfigError
from gradstream.wire import v1
from gradstream.wire.frames import MAX_PAYLOAD_BYTES

# ---- chunks ------------------------------------------------------------------------------

ALIGNMENT_ELEMS = 64

CHUNK_ELEMS = 1 << 18
"""Default length of a chunk: 1 MiB of float32."""

MAX_CHUNK_ELEMS = MAX_PAYLOAD_BYTES // 8
"""Largest length of a chunk: this number of float64 elements fills a frame."""

SHARED_CHUNK_BYTES = 16 << 20
SHARED_CHUNKS = 16


def shared_chunk_elems(elems: int, itemsize_bytes: int, num_shards: int) -> int:
    """The length of a chunk if all nodes exchange through shared memory: n = 2^k, at least 2^18 elements.

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
    """The largest chunk length that gives a vector of this many elements a chunk for each of some parts.

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


# ---- placement ---------------------------------------------------------------------------
# `Placement`: which shards hold the parameters, and which chunks each of them has.


@dataclass(frozen=True, slots=True)
class Placement:
    """The shards of ranks [first, first + shards) hold the parameters, chunk c that of rank first + c mod shards.

    A run that changes its number of shards takes new ranks, larger than all before. So `first` is the number of a
    placement, and a shard belongs to one placement for all of its life.

    Args:
        first: rank of its first shard.
        shards: number of its shards.
    """

    first: int
    shards: int

    @classmethod
    def of(cls, message: v1.Placement) -> Placement:
        """The placement in a message."""
        return cls(message.first, message.shards)

    def as_message(self) -> v1.Placement:
        """The placement as messages contain it."""
        return v1.Placement(first=self.first, shards=self.shards)

    @property
    def names(self) -> list[str]:
        """Names of its shards, in the order of their chunks."""
        return [f"shard-{rank}" for rank in range(self.first, self.first + self.shards)]

    def __contains__(self, rank: int) -> bool:
        return self.first <= rank < self.first + self.shards

    def of_part(self, part: int, parts: int) -> Placement:
        """The shards of one of so many parts of a split model, which are equally many, part by part."""
        shards = self.shards // parts
        return Placement(self.first + part * shards, shards)

    def chunk_map(self, elems: int, chunk_elems: int) -> ChunkMap:
        """The chunks of a vector of `elems` elements on these shards; ranks in it begin with 0."""
        return ChunkMap(elems, chunk_elems, self.shards)

    def divided(self, chunks: Iterable[int]) -> dict[str, dict[int, None]]:
        """These chunks by the shard that has them, in ascending order. Shards without any are skipped."""
        by_shard: dict[str, dict[int, None]] = {}
        for chunk in sorted(chunks):
            by_shard.setdefault(f"shard-{self.first + chunk % self.shards}", {})[chunk] = None
        return dict(sorted(by_shard.items(), key=lambda item: int(item[0].rpartition("-")[2])))


# ---- parts -------------------------------------------------------------------------------
# The parts of a split model: their names, and the place of each part's own vector in the unsplit one.
#
# A replica of K parts is K processes. Part 0 is the worker; parts 1 to K - 1 have roles and names of their own. A
# part's vector is its ranges of the unsplit model's flat vector, joined. Each part has shards of its own, equally
# many.

Bounds = tuple[int, int]


def role_of_part(part: int) -> str:
    """Role of the processes that hold a part."""
    return f"part{part}" if part else "worker"


def member_name(part: int, rank: int) -> str:
    """Node name of a part of the replica of this rank."""
    return f"{role_of_part(part)}-{rank}"


def part_of(name: str) -> int:
    """The part that a process of a replica holds, by its node name or role."""
    number = name.partition("-")[0].removeprefix("part")
    return int(number) if number.isdigit() else 0


def replica_of(rank: int, parts: int) -> list[str]:
    """Node names of all parts of the replica of this rank."""
    return [member_name(part, rank) for part in range(parts)]


@dataclass(frozen=True, slots=True)
class PartMap:
    """The place of one part's vector in the unsplit one.

    Args:
        ranges: [start, stop) of the unsplit vector, in the order of the part's own.
    """

    ranges: tuple[Bounds, ...]

    @property
    def elems(self) -> int:
        """Length of the part's vector."""
        return sum(stop - start for start, stop in self.ranges)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where elements [start, stop) of the part's vector lie: (start in the unsplit one, start, stop in its own)."""
        ends = accumulate(high - low for low, high in self.ranges)
        for (low, high), end in zip(self.ranges, ends, strict=True):
            first = end - (high - low)
            begin, until = max(start, first), min(stop, end)
            if begin < until:
                yield low + begin - first, begin, until

    def unsplit(self, bounds: Sequence[Bounds]) -> list[Bounds]:
        """The same for several ranges of the part's vector, as ranges of the unsplit one."""
        return [
            (at, at + until - begin)
            for start, stop in bounds
            for at, begin, until in self.pieces(start, stop)
        ]


def part_map_of(model: v1.ModelSpec, part: int) -> PartMap:
    """The place of a part of a registered model; of an unsplit model, part 0 is all of it."""
    if not model.parts:
        return PartMap(((0, model.elems),))
    bounds = model.parts[part].bounds
    return PartMap(tuple(zip(bounds[::2], bounds[1::2], strict=True)))


def shards_of(model: v1.ModelSpec, num_shards: int) -> list[int]:
    """Ranks of the shards that have chunks, of all parts; `num_shards` is the number of each part."""
    ranks: list[int] = []
    for part in range(max(1, len(model.parts))):
        elems = part_map_of(model, part).elems
        chunks = ChunkMap(elems, model.chunk_elems, num_shards)
        ranks += [part * num_shards + index for index in range(num_shards) if chunks.chunks_of(index)]
    return ranks
