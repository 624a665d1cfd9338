"""Distances between the contributions of a round, over the chunks of a shard. The sums over all shards are the whole.

A table has one row and column for the centre, then one for each worker by rank. Where a worker has left out a chunk,
its row is NaN, and so it is in the sum over the shards: all of them leave the worker out of the round alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from gradstream.server.robust import WholeRule


class DistanceTable:
    """Squared distances, added up chunk by chunk.

    Args:
        num_workers: W; the table has (1 + W)² numbers.
    """

    def __init__(self, num_workers: int) -> None:
        self._size = 1 + num_workers
        self._squares = torch.zeros(self._size, self._size, dtype=torch.float64)

    def add(
        self, contributions: Sequence[torch.Tensor | None], centre: torch.Tensor | None, *, pairs: bool
    ) -> None:
        """Adds one chunk.

        Args:
            contributions: elements by rank; None for a worker that has left the chunk out.
            centre: elements of the centre; None for zeros.
            pairs: whether to add the distances between contributions.
        """
        for rank, one in enumerate(contributions, start=1):
            if one is None:
                self._squares[rank] = self._squares[:, rank] = math.nan
                continue
            self._put(0, rank, one if centre is None else one - centre)
            for other_rank, other in enumerate(contributions[: rank - 1] if pairs else (), start=1):
                if other is not None:
                    self._put(other_rank, rank, one - other)

    def _put(self, row: int, column: int, difference: torch.Tensor) -> None:
        square = torch.linalg.vector_norm(difference, dtype=torch.float64) ** 2
        self._squares[row, column] += square
        self._squares[column, row] = self._squares[row, column]

    @property
    def flat(self) -> list[float]:
        """All numbers, row by row."""
        return [float(one) for one in self._squares.flatten().tolist()]


def weights_of(rule: WholeRule, distances: Sequence[float], ranks: Iterable[int]) -> dict[int, float]:
    """The weight of each worker's contribution, by rank; 0 for one that is left out.

    Args:
        rule: the rule.
        distances: sums of the shards' tables.
        ranks: the workers whose contributions this chunk has.
    """
    size = math.isqrt(len(distances))
    there = [rank for rank in range(1, size) if not math.isnan(distances[rank])]
    from_centre = [distances[rank] for rank in there]
    between = [[distances[size * row + column] for column in there] for row in there] if rule.pairs else []
    weights = rule.weights(from_centre, between) if there else []
    found = {rank - 1: weight for rank, weight in zip(there, weights, strict=True)}
    return {rank: found.get(rank, 0.0) for rank in ranks}
