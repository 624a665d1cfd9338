"""The parts of a split model: their names, and the place of each part's own vector in the unsplit one.

A replica of K parts is K processes. Part 0 is the worker; parts 1 to K - 1 have roles and names of their own. A part's
vector is its ranges of the unsplit model's flat vector, joined. Each part has shards of its own, equally many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap

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
    found: list[int] = []
    for part in range(max(1, len(model.parts))):
        elems = part_map_of(model, part).elems
        chunks = ChunkMap(elems, model.chunk_elems, num_shards)
        found += [part * num_shards + index for index in range(num_shards) if chunks.chunks_of(index)]
    return found
