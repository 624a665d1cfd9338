"""Clocks: how far each worker is, as each chunk of a shard has seen it.

A worker's clock is the number of its updates, and travels with each of them; a chunk's clock of a worker is
that of the worker's newest update which is in the chunk. So the clock of the slowest worker says of a chunk
what it includes: at clock c, every worker's first c updates.

Who has nothing to do takes no part, and nobody waits for it; who comes back does so at the clock of the
slowest, or at its own if that is later. Who is lost does not come back, whatever of it is still under way.
Pure: no I/O.

Reference: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["NOBODY", "Clocks"]

NOBODY = 1 << 62
"""The clock of the slowest of no workers: no one has to be waited for."""


class Clocks:
    """The clocks of all workers, chunk by chunk.

    Args:
        chunks: of this shard.
        num_workers: all of them take part at first, at clock 0.
    """

    def __init__(self, chunks: Iterable[int], num_workers: int) -> None:
        self._in = dict.fromkeys(range(num_workers))
        self._lost: set[int] = set()
        self._at: dict[int, dict[int, int]] = {chunk: {} for chunk in chunks}

    @property
    def present(self) -> frozenset[int]:
        """The ranks of those who take part."""
        return frozenset(self._in)

    def advance(self, chunk: int, rank: int, clock: int) -> None:
        """A worker's update is in a chunk: its first `clock` ones are. Clocks never go back."""
        at = self._at[chunk]
        at[rank] = max(clock, at.get(rank, 0))

    def slowest(self, chunk: int) -> int:
        """The clock that a chunk includes; `NOBODY` where no worker takes part."""
        at = self._at[chunk]
        if not at and self._in:  # of a strategy that keeps none, too
            return 0
        return min((at.get(rank, 0) for rank in self._in), default=NOBODY)

    def behind(self, chunk: int, clock: int) -> list[int]:
        """The ranks of those who take part and are not there yet."""
        at = self._at[chunk]
        return [rank for rank in sorted(self._in) if at.get(rank, 0) < clock]

    def pause(self, rank: int) -> None:
        """A worker has nothing to do for now."""
        self._in.pop(rank, None)

    def resume(self, rank: int, clock: int) -> int:
        """A worker is at this clock, and takes part.

        Returns:
            Its clock from now on, on all chunks of this shard: where it took no part, the clock of the
            slowest if that is later, so that nobody is further ahead of it than of another.
        """
        if rank not in self._in:
            found = (self.slowest(chunk) for chunk in self._at)
            clock = max([clock, *(slowest for slowest in found if slowest < NOBODY)])
        for chunk in self._at:
            self.advance(chunk, rank, clock)
        if rank not in self._lost:
            self._in[rank] = None
        return clock

    def keep(self, ranks: Collection[int]) -> None:
        """All other workers are lost."""
        for rank in [rank for rank in self._in if rank not in ranks]:
            self.pause(rank)
            self._lost.add(rank)
