"""The gradient noise scale B = tr Σ / |G|², from gradients that a run computes anyway.

    S = (s - J) / (m - 1/b)     estimates tr Σ,   s = 1/W·Σᵢ |gᵢ|²,   m = 1/W·Σᵢ 1/bᵢ
    Q = J - S·(1/b - 1/n)       estimates |G|²,   J = |g|²,           b = Σᵢ bᵢ
    B = mean S / mean Q         exponential means, each of its own: a mean of quotients would be biased

G is the mean gradient over all data, Σ the covariance of the gradient of one sample. gᵢ is the mean gradient of worker
i over its bᵢ samples, and g that over the samples of all W workers, all at the same parameters. An epoch has each of
its n samples once, so minibatches are drawn without replacement, and E|gᵢ|² = |G|² + tr Σ·(1/bᵢ - 1/n) gives both
lines. With equal bᵢ and infinite n, they are those of the paper, with B_small = bᵢ and B_big = b.

Reference: McCandlish, Kaplan, Amodei and others, "An empirical model of large-batch training", 2018, appendix A.1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradstream.telemetry.events import EventDict

SQUARES = ("contribution_square", "joined_square")

DECAY = 0.95
"""Weight of the mean before a measured round: a mean over about 20 rounds."""


@dataclass(slots=True)
class NoiseScale:
    """Exponential means over measured rounds.

    Args:
        decay: weight of the mean before a round, in [0, 1]. The first rounds count equally, so that no initial value
            biases the mean; with 1 all rounds do.
        population: n, number of training samples, from which minibatches are drawn without replacement; infinite for a
            stream.

    Attributes:
        rounds: number of rounds so far.
        trace: mean estimate of tr Σ.
        square: mean estimate of |G|², which noise may make negative.

    Example:
        >>> estimate = NoiseScale()
        >>> estimate.add(2, 1.0, contribution_square=5.0, joined_square=3.0)
        >>> estimate.trace, estimate.square, estimate.value
        (4.0, 1.0, 4.0)
    """

    decay: float = DECAY
    population: float = math.inf
    rounds: int = 0
    trace: float = 0.0
    square: float = 0.0

    def add(
        self, samples: int, inverse_samples: float, contribution_square: float, joined_square: float
    ) -> None:
        """Adds a round of at least two contributions.

        Args:
            samples: b, number of samples of all contributions.
            inverse_samples: m, mean of 1/bᵢ; above 1/b.
            contribution_square: s, mean square of the contributions' mean gradients.
            joined_square: J, square of the mean gradient over all samples.
        """
        trace = (contribution_square - joined_square) / (inverse_samples - 1 / samples)
        square = joined_square - trace * (1 / samples - 1 / self.population)
        weight = max(1 / (self.rounds + 1), 1 - self.decay)
        self.trace += weight * (trace - self.trace)
        self.square += weight * (square - self.square)
        self.rounds += 1

    @property
    def value(self) -> float | None:
        """B, in samples; None while the estimate of |G|² is not positive."""
        return self.trace / self.square if self.rounds and self.square > 0 else None


def rounds_of(events: Iterable[EventDict]) -> list[EventDict]:
    """One event for each measured round, in order, with the squares of all its nodes.

    A round in which a node was lost, or the number of nodes changed, is skipped.
    """
    by_round: defaultdict[int, dict[str, EventDict]] = defaultdict(dict)
    for event in events:
        if event["event"] == "noise":
            by_round[event["round"]][event["node"]] = event
    rounds: list[EventDict] = []
    for number in sorted(by_round):
        nodes = list(by_round[number].values())
        if {len(nodes)} == {node["nodes"] for node in nodes} and len(
            {node["samples"] for node in nodes}
        ) == 1:
            sums = {key: math.fsum(node[key] for node in nodes) for key in SQUARES}
            rounds.append({**nodes[0], "time_s": max(node["time_s"] for node in nodes), **sums})
    return rounds


def noise_scale_of(events: Iterable[EventDict]) -> tuple[float | None, str, list[tuple[int, float, float]]]:
    """The gradient noise scale of a run: its last value, why there is none, and its values over the run.

    Returns:
        B in samples, or None; the reason, "" if there is a value or it was not measured; (round, time_s, B) of
        each round with a value.
    """
    events = list(events)
    num_samples = next((event.get("num_samples") for event in events if event["event"] == "started"), None)
    estimate, points = NoiseScale(population=num_samples or math.inf), list[tuple[int, float, float]]()
    rounds = rounds_of(events)
    for event in rounds:
        if event["contributions"] > 1:
            estimate.add(event["samples"], event["inverse_samples"], event[SQUARES[0]], event[SQUARES[1]])
            if estimate.value is not None:
                points.append((event["round"], event["time_s"], estimate.value))
    return estimate.value, _why_none(rounds, estimate), points


def _why_none(rounds: Sequence[EventDict], estimate: NoiseScale) -> str:
    if not rounds or estimate.value is not None:
        return ""
    if not estimate.rounds:
        return "none: one worker, and batches of two sizes are needed; take workers=2"
    return f"none: after {estimate.rounds} measured rounds |G|² is not above its noise; take more steps or samples"
