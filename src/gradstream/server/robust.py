"""Robust aggregation: updates of a round that a few wrong contributions cannot move far. Pure arithmetic.

    n contributions g_1 … g_n, of which up to f are anything at all

    median              the median, coordinate by coordinate                            f < n/2
    trimmed-mean        the mean without the f smallest and the f largest, likewise     f < n/2
    krum                the mean of the m contributions of the lowest score; the score of g_i is the sum of the
                        n - f - 2 smallest |g_i - g_j|²                                 n ≥ 2f + 3
    clipped-mean        Σ g_i·min(1, τ/|g_i|) / n
    centered-clipping   v ← v + Σ (g_i - v)·min(1, τ/|g_i - v|) / n, v the update before

The first two look at one chunk at a time. The others need distances over the whole gradient: each shard adds up those
of its chunks, the first shard adds up those of the shards, and all take the same weights (`shard/agreement.py`).

Each contribution is a mean over its samples, and counts equally whatever their number. A worker that contributes
nothing in a round reduces n, and f is at most what n allows.

References: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning", ICML 2018 (median, trimmed
mean); Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries", NIPS 2017 (Krum, multi-Krum);
Karimireddy, He, Jaggi, "Learning from history for Byzantine robust optimization", ICML 2021 (centred clipping, one
iteration, with momentum on the workers).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from gradstream.errors import ConfigError

BLOCK_ELEMS = 1 << 16
"""Coordinates that are sorted at once: those of 16 workers take 4 MiB."""


class RobustRule:
    """How the contributions of a round become one vector."""

    def check(self, num_workers: int) -> None:
        """Raises ConfigError if the rule promises nothing with this many workers."""
        del num_workers


class CoordinateRule(RobustRule, ABC):
    """A rule that looks at each coordinate separately."""

    @abstractmethod
    def of_sorted(self, values: torch.Tensor) -> torch.Tensor:
        """The result, (b,), of the values of all contributions, (n, b), sorted in each column."""

    def combine(self, parts: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
        """The result of the contributions scale·part, each (e,)."""
        out = torch.empty_like(parts[0])
        for start in range(0, len(out), BLOCK_ELEMS):
            block = slice(start, start + BLOCK_ELEMS)
            scaled = [part[block] * scale for part, scale in zip(parts, scales, strict=True)]
            out[block] = self.of_sorted(torch.stack(scaled).sort(dim=0).values)
        return out


class WholeRule(RobustRule, ABC):
    """A rule whose weights depend on distances over the whole gradient."""

    pairs: ClassVar[bool] = False
    """Whether it needs the distances between contributions, and not only from the centre."""

    centred: ClassVar[bool] = False
    """Whether the centre is the update before; else it is 0."""

    @abstractmethod
    def weights(self, from_centre: Sequence[float], between: Sequence[Sequence[float]]) -> list[float]:
        """The weight of each contribution. The centre gets the rest to 1, or none if it is 0.

        Args:
            from_centre: |g_i - v|² of each contribution.
            between: |g_i - g_j|²; empty unless `pairs`.
        """


@dataclass(frozen=True, slots=True)
class Median(CoordinateRule):
    """The coordinate-wise median; of an even number, the mean of the middle two."""

    @override
    def of_sorted(self, values: torch.Tensor) -> torch.Tensor:
        middle, odd = divmod(len(values), 2)
        return values[middle].clone() if odd else values[middle - 1 : middle + 1].mean(dim=0)


@dataclass(frozen=True, slots=True)
class TrimmedMean(CoordinateRule):
    """The coordinate-wise mean without the f smallest and the f largest values.

    Args:
        faulty: f.
    """

    faulty: int

    def check(self, num_workers: int) -> None:
        """See `RobustRule`: f < W/2."""
        if 2 * self.faulty >= num_workers:
            raise _too_many("trimmed-mean", self.faulty, num_workers, "less than half of them")

    @override
    def of_sorted(self, values: torch.Tensor) -> torch.Tensor:
        cut = min(self.faulty, (len(values) - 1) // 2)
        return values[cut : len(values) - cut].mean(dim=0)


@dataclass(frozen=True, slots=True)
class Krum(WholeRule):
    """The mean of the m contributions that have their n - f - 2 nearest others nearest.

    Args:
        faulty: f.
        keep: m.
    """

    pairs: ClassVar[bool] = True

    faulty: int
    keep: int = 1

    def check(self, num_workers: int) -> None:
        """See `RobustRule`: W ≥ 2f + 3, m ≤ W - f."""
        if num_workers < 2 * self.faulty + 3:
            most = f"at most {(num_workers - 3) // 2}" if num_workers >= 3 else "at least 3 workers"
            raise _too_many("krum", self.faulty, num_workers, f"{most}, since W ≥ 2·faulty + 3")
        if self.keep > num_workers - self.faulty:
            raise ConfigError(
                f"aggregate='krum', keep={self.keep}, faulty={self.faulty} with {num_workers} workers: expected "
                f"keep={num_workers - self.faulty} at most, or a wrong contribution is among those kept"
            )

    def weights(self, from_centre: Sequence[float], between: Sequence[Sequence[float]]) -> list[float]:
        """See `WholeRule`. Of equal scores the lower ranks are kept."""
        count = len(from_centre)
        faulty = max(0, min(self.faulty, (count - 3) // 2))
        nearest = max(1, count - faulty - 2)
        scores = [
            math.fsum(sorted(others[:rank] + others[rank + 1 :])[:nearest])
            for rank, others in enumerate(map(list, between))
        ]
        kept = sorted(range(count), key=lambda rank: (scores[rank], rank))[: self.keep]
        return [1 / len(kept) if rank in kept else 0.0 for rank in range(count)]


@dataclass(frozen=True, slots=True)
class ClippedMean(WholeRule):
    """The mean of the contributions, each clipped on the server to a norm of at most τ.

    Args:
        radius: τ.
    """

    radius: float

    @override
    def weights(self, from_centre: Sequence[float], between: Sequence[Sequence[float]]) -> list[float]:
        del between
        shares = (min(1.0, self.radius / math.sqrt(square)) if square else 1.0 for square in from_centre)
        return [share / len(from_centre) for share in shares]


@dataclass(frozen=True, slots=True)
class CenteredClipping(ClippedMean):
    """As `ClippedMean`, about the update before. It begins at 0, also where a run is resumed."""

    centred: ClassVar[bool] = True


def _too_many(name: str, faulty: int, num_workers: int, expected: str) -> ConfigError:
    return ConfigError(
        f"aggregate={name!r}, faulty={faulty} with {num_workers} workers: expected {expected}; take more workers, "
        "or a smaller number of faulty ones"
    )


# ---- distances ---------------------------------------------------------------------------
# Squared distances between the contributions of a round, over the chunks of a shard: those of all shards add up to the
# whole. A table has one row and column for the centre, then one for each worker by rank. If a worker has not sent a
# chunk, its row is NaN, and so it is in the sum over the shards: all of them exclude the worker from the round.


def add_distances(
    squares: torch.Tensor,
    contributions: Sequence[torch.Tensor | None],
    centre: torch.Tensor | None,
    *,
    pairs: bool,
) -> None:
    """Adds one chunk to a table.

    Args:
        squares: (1 + W, 1 + W) float64, the table.
        contributions: elements by rank; None for a worker that has left the chunk out.
        centre: elements of the centre; None for zeros.
        pairs: whether to add the distances between contributions.
    """

    def put(row: int, column: int, difference: torch.Tensor) -> None:
        squares[row, column] += torch.linalg.vector_norm(difference, dtype=torch.float64) ** 2
        squares[column, row] = squares[row, column]

    for rank, contribution in enumerate(contributions, start=1):
        if contribution is None:
            squares[rank] = squares[:, rank] = math.nan
            continue
        put(0, rank, contribution if centre is None else contribution - centre)
        for other_rank, other in enumerate(contributions[: rank - 1] if pairs else (), start=1):
            if other is not None:
                put(other_rank, rank, contribution - other)


def weights_of(rule: WholeRule, distances: Sequence[float], ranks: Iterable[int]) -> dict[int, float]:
    """The weight of each worker's contribution, by rank; 0 for one that is skipped.

    Args:
        rule: the rule.
        distances: sums of the shards' tables, row by row.
        ranks: the workers whose contributions this chunk has.
    """
    size = math.isqrt(len(distances))
    there = [rank for rank in range(1, size) if not math.isnan(distances[rank])]
    from_centre = [distances[rank] for rank in there]
    between = [[distances[size * row + column] for column in there] for row in there] if rule.pairs else []
    weights = rule.weights(from_centre, between) if there else []
    found = {rank - 1: weight for rank, weight in zip(there, weights, strict=True)}
    return {rank: found.get(rank, 0.0) for rank in ranks}
