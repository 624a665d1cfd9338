"""Schedules: what each rank sends and receives, as data.

A schedule is one rank's list of steps on its vector, which is combined in place. The steps take effect as if
they ran one after the other, in the order listed. But a step has to wait only for earlier steps on the same
elements, so that an executor may run the others at the same time, and a long step piece by piece. What one
rank sends to another arrives in the order sent.

A schedule is made by a pure function of (rank, size, elems), one for each algorithm, in
`gradstream.collectives.algorithms`. `gradstream.testing.schedule_checks` executes the schedules of all ranks
on plain arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Send:
    """Sends the elements [start, stop), with the values that earlier steps have left, to rank `peer`."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Receives elements from rank `peer` which replace [start, stop), or are added to them."""

    peer: int
    start: int
    stop: int
    add: bool = False


Step: TypeAlias = Send | Recv

Schedule: TypeAlias = Sequence[Step]
"""The steps of one rank, in order."""

MakeSchedule: TypeAlias = Callable[[int, int, int], list[Step]]
"""Makes the schedule of a rank from (rank, size, elems)."""


def cuts_of(elems: int, parts: int) -> list[int]:
    """Edges that divide `elems` elements into `parts` parts, whose lengths differ by at most one.

    Part i is [cuts[i], cuts[i + 1]).
    """
    return [elems * part // parts for part in range(parts + 1)]


@dataclass(frozen=True, slots=True)
class ScheduleCost:
    """Cost of an algorithm on the critical path: seconds = alphas·α + betas·n·β + gammas·n·γ + overhead·o.

    Args:
        alphas: number of messages one after the other; each costs α seconds, however short it is.
        betas: number of vectors sent or received one after the other; each costs n·β seconds.
        gammas: number of vectors added; each costs n·γ seconds.
        overhead: number of messages that a rank handles besides those, at the same time; each costs o seconds
            of its processor. Textbooks leave them out, since a network carries them at once.
    """

    alphas: float
    betas: float
    gammas: float = 0.0
    overhead: float = 0.0

    def seconds(
        self,
        num_bytes: int,
        alpha_s: float,
        beta_s_byte: float,
        gamma_s_byte: float = 0.0,
        message_s: float = 0.0,
    ) -> float:
        """Seconds for a vector of `num_bytes` bytes.

        Args:
            num_bytes: length of the vector.
            alpha_s: α, in seconds.
            beta_s_byte: β, for each byte.
            gamma_s_byte: γ, for each byte.
            message_s: o, in seconds.
        """
        per_byte_s = self.betas * beta_s_byte + self.gammas * gamma_s_byte
        return self.alphas * alpha_s + self.overhead * message_s + num_bytes * per_byte_s
