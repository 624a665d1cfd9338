"""What a node measures for the gradient noise scale: squares of gradients, in one of `EVERY` rounds.

    s = 1/W·Σᵢ |gᵢ|²,   gᵢ the mean gradient of contribution i, over its bᵢ samples
    J = |g|²,           g = Σᵢ bᵢ·gᵢ / Σᵢ bᵢ, the joined gradient

Both are sums over elements, so each node adds up those that it has, and `report.noise_scale` adds up the nodes. All
contributions of a round are computed on the same parameters: else s and J say nothing about noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradstream.telemetry.events import Event, NoiseEvent

EVERY = 16
"""Rounds from one measured round to the next: measuring takes a sixteenth of one or two passes over the gradient."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A worker's part of a joined gradient.

    Args:
        samples: b, number of samples, at least 1.
        weight: weight in the sum that is the joined gradient.
        square: sum of the squares of its elements on this node, before they are weighed.
    """

    samples: int
    weight: float
    square: float


@dataclass(slots=True)
class NoiseMeter:
    """Adds up the squares of the pieces of a gradient that a node has, and reports a round when it has all.

    Args:
        nodes: number of nodes that have a part of the squares.
        pieces: number of calls of `add` for each round, at least 1.
        emit: gets the event of each measured round.
    """

    rank: int
    nodes: int
    pieces: int
    emit: Callable[[Event], None]
    _step: int = 0
    _samples: Sequence[int] = ()
    _squares: list[tuple[float, float]] = field(default_factory=list)

    def due(self, step: int) -> bool:
        """Whether the update of this number, from 1, is measured."""
        return step % EVERY == 1

    def add(self, step: int, samples: Sequence[int], here: Sequence[Contribution], joined: float) -> None:
        """Takes a piece of a round. Rounds come one after the other; one that lacks a piece is not reported.

        Args:
            step: number of the update, from 1.
            samples: bᵢ of all contributions with samples, in the order of ranks.
            here: the contributions of which this node has elements.
            joined: sum of the squares of the joined gradient's elements in this piece.
        """
        if step != self._step:
            self._step, self._samples, self._squares = step, tuple(samples), []
        if tuple(samples) != self._samples or not samples:  # one came to some pieces alone
            self._samples = ()
            return
        total = sum(samples)
        squares = [(part.weight * total / part.samples) ** 2 * part.square for part in here]
        self._squares.append((math.fsum(squares) / len(samples), joined))
        square, joined_square = (math.fsum(column) for column in zip(*self._squares, strict=True))
        if len(self._squares) < self.pieces or not math.isfinite(square + joined_square):
            return
        self.emit(
            NoiseEvent(
                rank=self.rank,
                round=step,
                nodes=self.nodes,
                contributions=len(samples),
                samples=total,
                inverse_samples=math.fsum(1 / size for size in samples) / len(samples),
                contribution_square=square,
                joined_square=joined_square,
            )
        )
