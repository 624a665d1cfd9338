"""Shares of a round by measured speed: when they are measured, and how a round is divided by them.

A round is B consecutive positions of the epoch's order, whatever the shares: they say only which of
these a worker takes. So the joined batch, the learning rate and what is done of an epoch do not depend
on them, and the mean over the joined batch, Σ bᵢgᵢ / Σ bᵢ, is the same sum in other parts.

    rounds of an epoch    0 … 3 │ 4 … 7 │ 8 … 15 │ 16 … 31 │ …      stretches: shares stay as they are
                          measured before each stretch, on what was computed since it was asked before

Stretches grow, so it costs a logarithm of messages; they begin anew with each epoch, so that a machine
that has become slower is noticed in the next one at the latest.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["MEASURED", "WorkerSpeed", "begins_window", "better", "dealt", "window_end"]

MEASURED: Literal["measured"] = "measured"
"""What a job says instead of numbers."""

FIRST_WINDOW = 4
"""Rounds."""

MEMORY = 64
"""Rounds after which a measurement counts half."""

THRESHOLD = 0.05
"""Of a round's computing time: what other sizes must gain at least."""

SURE = 2.0
"""Standard errors."""


def window_end(batch: int) -> int:
    """The round of an epoch before which shares are measured next, after round `batch`: a power of 2."""
    return max(FIRST_WINDOW, 1 << batch.bit_length())


def begins_window(batch: int) -> bool:
    """Whether shares are measured before this round of an epoch."""
    return batch == 0 or (batch >= FIRST_WINDOW and batch & (batch - 1) == 0)


@dataclass(slots=True)
class WorkerSpeed:
    """How fast a worker goes through samples, and how sure that is.

    Args:
        rounds: how many gradients it is of; a fraction where old ones count less.
        samples: Σ bₖ of them.
        seconds: Σ tₖ.
        squares: Σ tₖ² / bₖ, which gives the variance of the seconds a sample takes.
    """

    rounds: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0

    def took(self, samples: int, seconds: float) -> None:
        """One gradient; one without samples says nothing."""
        if samples > 0 and seconds > 0:
            self.rounds += 1
            self.samples += samples
            self.seconds += seconds
            self.squares += seconds * seconds / samples

    def measured(self, measured: WorkerSpeed) -> None:
        """Takes in what was measured since. Of what came before, the last `MEMORY` rounds count half."""
        kept = 0.5 ** (measured.rounds / MEMORY)
        self.rounds = kept * self.rounds + measured.rounds
        self.samples = kept * self.samples + measured.samples
        self.seconds = kept * self.seconds + measured.seconds
        self.squares = kept * self.squares + measured.squares

    @property
    def per_s(self) -> float | None:
        """Samples a second; None before anything was measured."""
        return self.samples / self.seconds if self.seconds else None

    @property
    def error(self) -> float:
        """Standard error of `per_s`, relative to it: the spread of single rounds over √rounds."""
        if self.rounds < 2 or not self.per_s:
            return math.inf
        mean = self.seconds / self.samples
        variance = max(0.0, self.squares / self.samples - mean * mean)
        return math.sqrt(variance / self.rounds) / mean


def dealt(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """`total` samples, dealt so that the last worker is done as early as possible; at least one each.

    Minimizes maxᵢ bᵢ / sᵢ over whole numbers with Σ bᵢ = total: bᵢ = ⌊total·sᵢ / Σs⌋ is never too
    much, and each sample that is left goes to whom it makes done first.

    Args:
        total: of a round; at least as many as there are speeds.
        speeds: samples a second, all above 0.
    """
    whole = math.fsum(speeds)
    sizes = [max(1, math.floor(total * speed / whole)) for speed in speeds]
    ranks = range(len(speeds))
    for _ in itertools.repeat(None, max(0, total - sum(sizes))):
        sizes[min(ranks, key=lambda rank: (sizes[rank] + 1) / speeds[rank])] += 1
    for _ in itertools.repeat(None, max(0, sum(sizes) - total)):
        more = [rank for rank in ranks if sizes[rank] > 1]
        sizes[max(more, key=lambda rank: sizes[rank] / speeds[rank])] -= 1
    return tuple(sizes)


def better(sizes: Sequence[int], speeds: Mapping[int, WorkerSpeed]) -> tuple[int, ...]:
    """Sizes by which all workers are done at about the same time; those given, unless others gain enough.

        sᵢ = samples / seconds         T(b) = maxᵢ bᵢ / sᵢ, how long a round computes
        b* = argmin T, Σ bᵢ = Σ sizes  taken if T(b*) < (1 - m) · T(sizes)
        m  = max(THRESHOLD, SURE · maxᵢ errorᵢ)

    errorᵢ is the relative standard error of sᵢ: where times vary, what seems to be a gain may be none, and
    sizes that followed it would change for ever. Where a gradient has a fixed part besides, sᵢ depends on
    bᵢ, and what is repeated converges to equal times all the same.

    Args:
        sizes: of each worker, by rank.
        speeds: of those who are there, by rank. The others get nothing; who has measured nothing, and had
            nothing to measure, is taken for the median.
    """
    known = {rank: speed.per_s for rank, speed in speeds.items()}
    typical = statistics.median([per_s for per_s in known.values() if per_s] or [1.0])
    per_s = {rank: found or typical for rank, found in known.items()}
    shares = dict(zip(per_s, dealt(sum(sizes), list(per_s.values())), strict=True))
    best = tuple(shares.get(rank, 0) for rank in range(len(sizes)))
    if any((size > 0) != (rank in per_s) for rank, size in enumerate(sizes)):
        return best

    def longest_s(parts: Sequence[int]) -> float:
        return max(parts[rank] / found for rank, found in per_s.items())

    margin = max(THRESHOLD, SURE * max(speeds[rank].error for rank in per_s))
    return best if longest_s(best) < (1 - margin) * longest_s(sizes) else tuple(sizes)
