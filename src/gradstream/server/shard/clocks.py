"""Clocks: the number of updates of each worker that each chunk of a shard includes.

A worker's clock is the number of its updates, and every push has the clock of its worker. A chunk keeps, for each
worker, the clock of the worker's newest push in it. If c is the smallest of these clocks, the chunk includes the
first c updates of every worker.

A worker that has nothing to do takes no part, and nobody waits for it. When it resumes, its clock becomes the clock
of the slowest worker, unless its own is later. A lost worker does not resume, even if a message of it still
arrives; a process that takes its place enters like a worker that resumes, at clock 0. Pure: no I/O.

Reference: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

NOBODY = 1 << 62
"""The smallest clock where no worker takes part: nobody waits."""


class Clocks:
    """Keeps each worker's clock, chunk by chunk, and tells the smallest.

    Args:
        chunks: numbers of this shard's chunks.
        num_workers: number of workers; all take part at first, at clock 0.

    Attributes:
        entered: by rank, the clock at which a worker has last resumed.
    """

    def __init__(self, chunks: Iterable[int], num_workers: int) -> None:
        self._in = dict.fromkeys(range(num_workers))
        self._lost: set[int] = set()
        self._at: dict[int, dict[int, int]] = {chunk: {} for chunk in chunks}  # by chunk and rank
        self.entered: dict[int, int] = {}

    @property
    def present(self) -> frozenset[int]:
        """The ranks of the workers that take part."""
        return frozenset(self._in)

    def at(self, chunk: int) -> Mapping[int, int]:
        """The clocks of a chunk, by rank; a worker without a push is missing."""
        return self._at[chunk]

    def advance(self, chunk: int, rank: int, clock: int) -> None:
        """Notes that a chunk includes a worker's first `clock` updates. Clocks never go back."""
        at = self._at[chunk]
        at[rank] = max(clock, at.get(rank, 0))

    def slowest(self, chunk: int) -> int:
        """The smallest clock of a chunk; `NOBODY` where no worker takes part."""
        at = self._at[chunk]
        if not at and self._in:  # also where the strategy has no clocks
            return 0
        return min((at.get(rank, 0) for rank in self._in), default=NOBODY)

    def behind(self, chunk: int, clock: int) -> list[int]:
        """The ranks of the workers that take part and have not reached this clock."""
        at = self._at[chunk]
        return [rank for rank in sorted(self._in) if at.get(rank, 0) < clock]

    def pause(self, rank: int) -> None:
        """Stops waiting for a worker: it has nothing to do for now."""
        self._in.pop(rank, None)

    def resume(self, rank: int, clock: int) -> int:
        """Lets a worker take part from this clock on, a paused worker from the slowest worker's clock if that is later.

        Returns:
            The worker's clock from now on, on all chunks of this shard.
        """
        if rank not in self._in:
            found = (self.slowest(chunk) for chunk in self._at)
            clock = max([clock, *(slowest for slowest in found if slowest < NOBODY)])
        for chunk in self._at:
            self.advance(chunk, rank, clock)
        self.entered[rank] = clock
        if rank not in self._lost:
            self._in[rank] = None
        return clock

    def lacks(self, ranks: Collection[int]) -> bool:
        """Whether `keep` would change anything."""
        return not set(ranks).isdisjoint(self._lost) or not self._in.keys() <= set(ranks)

    def keep(self, ranks: Collection[int]) -> None:
        """Stops waiting for all other workers: they are lost. A lost one of these ranks may take part again."""
        self._lost.difference_update(ranks)
        for rank in [rank for rank in self._in if rank not in ranks]:
            self.pause(rank)
            self._lost.add(rank)
            self.entered.pop(rank, None)
            for at in self._at.values():
                at.pop(rank, None)
