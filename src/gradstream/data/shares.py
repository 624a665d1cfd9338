"""Shares of a round by measured speed: when they are measured, and how they divide a round.

A round is B consecutive positions of the epoch's order. Shares only decide which worker takes which of them. So the
joined batch, the learning rate and the progress of an epoch do not depend on shares, and the mean over the joined
batch, Σ bᵢgᵢ / Σ bᵢ, is the same sum with other terms.

    rounds of an epoch    0 │ 1 │ 2, 3 │ 4 … 7 │ 8 … 15 │ 16 … 31 │ …    rebalance windows: shares do not change inside
                          before each window workers report the gradients since their previous report

The first ones are short, since a round may be long: local SGD has 20 minibatches or more in one. Windows grow, so
that the number of messages is logarithmic. They begin anew in each epoch, so that a machine that has become slower is
noticed in the next epoch at the latest.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

MEASURED: Literal["measured"] = "measured"
"""The value of `shares` in a job instead of numbers."""

MANY = 8
"""Minibatches of a gradient beside which what happens only once, in a worker's first gradient, is little."""

MEMORY = 64
"""Rounds after which a measurement has half the weight."""

THRESHOLD = 0.05
"""Share of a round's computing time that other sizes must save at least."""

SURE = 2.0
"""Standard errors that other sizes must save at least."""

ONE_ROUND = 0.25
"""Relative standard error of one gradient, which has no spread: so other sizes must save half of the time."""


def window_end(batch: int) -> int:
    """The first round of the next window after round `batch` of an epoch: a power of 2."""
    return 1 << batch.bit_length()


def begins_window(batch: int) -> bool:
    """Whether a window begins with this round of an epoch."""
    return batch & (batch - 1) == 0


@dataclass(slots=True)
class WorkerSpeed:
    """The measured speed of a worker, and its standard error.

    Args:
        rounds: number of measured gradients; a fraction, since old ones count less.
        samples: Σ bₖ, their samples.
        seconds: Σ tₖ, their durations.
        squares: Σ tₖ² / bₖ, for the variance of the seconds for each sample.
    """

    rounds: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0

    def took(self, samples: int, seconds: float) -> None:
        """Adds the measurement of a gradient, unless it has no samples."""
        if samples > 0 and seconds > 0:
            self.rounds += 1
            self.samples += samples
            self.seconds += seconds
            self.squares += seconds * seconds / samples

    def measured(self, measured: WorkerSpeed) -> None:
        """Adds new measurements; earlier ones lose half their weight in `MEMORY` rounds."""
        kept = 0.5 ** (measured.rounds / MEMORY)
        self.rounds = kept * self.rounds + measured.rounds
        self.samples = kept * self.samples + measured.samples
        self.seconds = kept * self.seconds + measured.seconds
        self.squares = kept * self.squares + measured.squares

    @property
    def per_s(self) -> float | None:
        """Samples per second; None without measurements."""
        return self.samples / self.seconds if self.seconds else None

    @property
    def error(self) -> float:
        """Relative standard error of `per_s`: the spread of single rounds / √rounds."""
        if self.rounds < 1 or not self.per_s:
            return math.inf
        if self.rounds < 2:
            return ONE_ROUND
        mean = self.seconds / self.samples
        variance = max(0.0, self.squares / self.samples - mean * mean)
        return math.sqrt(variance / self.rounds) / mean


def divided_by_speed(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Divides `total` samples so that the last worker finishes as early as possible; each gets at least one.

    Minimizes maxᵢ bᵢ / sᵢ over integers with Σ bᵢ = total: bᵢ = ⌊total·sᵢ / Σs⌋ is never too large, and each remaining
    sample goes to the worker that finishes first with it.

    Args:
        total: samples of a round, at least one for each worker.
        speeds: samples per second of each worker, all > 0.
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
    """Minibatch sizes with which all workers finish at about the same time; `sizes` unless that saves enough time.

        sᵢ = samples / seconds         T(b) = maxᵢ bᵢ / sᵢ, the computing time of a round
        b* = argmin T, Σ bᵢ = Σ sizes  taken if T(b*) < (1 - m) · T(sizes)
        m  = max(THRESHOLD, SURE · maxᵢ errorᵢ)

    errorᵢ is the relative standard error of sᵢ. Without it, sizes would follow the noise of varying durations and
    change for ever. If a gradient also takes a fixed time, sᵢ depends on bᵢ, but repeated calls converge to equal
    times.

    Args:
        sizes: sizes of each worker, by rank.
        speeds: speeds of the present workers, by rank. Others get no samples. A worker without measurements counts as
            the median.
    """
    known = {rank: speed.per_s for rank, speed in speeds.items()}
    typical = statistics.median([per_s for per_s in known.values() if per_s] or [1.0])
    per_s = {rank: speed or typical for rank, speed in known.items()}
    shares = dict(zip(per_s, divided_by_speed(sum(sizes), list(per_s.values())), strict=True))
    best = tuple(shares.get(rank, 0) for rank in range(len(sizes)))
    if any((size > 0) != (rank in per_s) for rank, size in enumerate(sizes)):
        return best

    def longest_s(parts: Sequence[int]) -> float:
        return max(parts[rank] / speed for rank, speed in per_s.items())

    margin = max(THRESHOLD, SURE * max(speeds[rank].error for rank in per_s))
    return best if longest_s(best) < (1 - margin) * longest_s(sizes) else tuple(sizes)
