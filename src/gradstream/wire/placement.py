"""`Placement`: which shards hold the parameters, and which chunks each of them has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap


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
        """These chunks by the shard that has them, in ascending order. Shards without any are left out."""
        found: dict[str, dict[int, None]] = {}
        for chunk in sorted(chunks):
            found.setdefault(f"shard-{self.first + chunk % self.shards}", {})[chunk] = None
        return dict(sorted(found.items(), key=lambda item: int(item[0].rpartition("-")[2])))
