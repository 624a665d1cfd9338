"""A quorum: the first N pushes of a round that have arrived whole make its update, on every chunk.

If each chunk chose its own first N pushes, they would come from other workers on every chunk; and if a worker died
halfway, some chunks would have its push and others not. So a push counts once every shard has every chunk of it,
and the first shard decides for all:

    each shard     chunk parked ─▶ all chunks of (round, rank) there? ─▶ "whole" to the first shard
    first shard    whole on all shards, N ranks? ─▶ decision (round, ranks) to all shards, once

Before the decision the shards apply nothing of a round; at the decision they have all that they need, so a worker
may die at any instant. A push that the decision leaves out is late, whenever it comes.

Reference: Chen, Pan, Monga, Bengio, Józefowicz, "Revisiting Distributed Synchronous SGD", 2016 (backup
workers). Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuorumDecision:
    """The pushes of the workers of these ranks, and no others, make the update of this round.

    Args:
        round: number of the round.
        ranks: ranks of the workers.
        distances: squared distances of their contributions, where their weights depend on them; see
            `shard/tensor_sums.py`.
    """

    round: int
    ranks: tuple[int, ...]
    distances: tuple[float, ...] = ()


class QuorumVotes:
    """Finds the pushes of which one shard has every chunk: the shard votes for each of these, once.

    Args:
        num_chunks: number of chunks on this shard.
    """

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._came: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # by (round, rank)
        self._decided = -1

    def came(self, round: int, rank: int, chunk: int) -> bool:  # noqa: A002  the word of the protocol
        """Counts a chunk that has arrived, once. Returns whether its push is whole now, and was not before."""
        if round <= self._decided:
            return False
        chunks = self._came[round, rank]
        before = len(chunks)
        chunks.add(chunk)
        return before < len(chunks) == self._num_chunks

    def decided(self, decision: QuorumDecision) -> None:
        """Forgets the decided round and all rounds before it."""
        self._decided = max(self._decided, decision.round)
        for key in [key for key in self._came if key[0] <= self._decided]:
            del self._came[key]

    @property
    def whole(self) -> list[tuple[int, int]]:
        """(round, rank) of the pushes that are whole and not decided, in order of arrival."""
        return [key for key, chunks in self._came.items() if len(chunks) == self._num_chunks]


class QuorumLeader:
    """Decides which N pushes make each update.

    Args:
        needed: N, the number of pushes to an update.
        num_shards: number of shards that have chunks.

    Attributes:
        last: newest decision; None before the first.
    """

    def __init__(self, needed: int, num_shards: int) -> None:
        self._needed = needed
        self._num_shards = num_shards
        self._shards: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # by (round, rank)
        self._ready: defaultdict[int, list[int]] = defaultdict(list)  # by round, in order of arrival
        self._tables: defaultdict[int, dict[int, Sequence[float]]] = defaultdict(dict)  # by round and shard
        self.last: QuorumDecision | None = None

    def whole(self, shard: int, round: int, rank: int) -> QuorumDecision | None:  # noqa: A002
        """Counts that a shard has a push whole, once. Returns the decision if this was the last vote that it needed."""
        if self.last is not None and round <= self.last.round:
            return None
        shards = self._shards[round, rank]
        shards.add(shard)
        ready = self._ready[round]
        if len(shards) == self._num_shards and rank not in ready:
            ready.append(rank)
        if len(ready) < self._needed:
            return None
        self.last = QuorumDecision(round, tuple(sorted(ready)))
        self._shards.clear()
        self._ready.clear()
        return self.last

    def measured(self, shard: int, round: int, distances: Sequence[float]) -> QuorumDecision | None:  # noqa: A002
        """Takes the distances that a shard has measured, with every push whole. Returns the decision at the last."""
        if self.last is not None and round <= self.last.round:
            return None
        tables = self._tables[round]
        tables[shard] = distances
        if len(tables) < self._num_shards:
            return None
        sums = (math.fsum(column) for column in zip(*(tables[one] for one in sorted(tables)), strict=True))
        self.last = QuorumDecision(round, tuple(range(self._needed)), tuple(sums))
        self._tables.clear()
        return self.last
