"""Schedules: what each rank sends and receives, as data.

A schedule is one rank's list of steps on its vector, which is combined in place. They take effect as if
done one after the other, in the order listed; but a step only ever has to wait for earlier steps on the
same elements, so that who carries them out may do the others at the same time, and a long step piece by
piece. What one rank sends to another arrives in the order sent.

A schedule is made by a pure function of (rank, size, elems), one for each algorithm, in
`gradstream.collectives.algorithms`. `gradstream.testing.schedule_checks` plays all ranks' schedules on
plain arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["MakeSchedule", "Recv", "Schedule", "ScheduleCost", "Send", "Step", "cuts_of"]


@dataclass(frozen=True, slots=True)
class Send:
    """The elements [start, stop), as they are when this step's turn comes, to rank `peer`."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Recv:
    """What rank `peer` sends takes the place of [start, stop), or is added to it."""

    peer: int
    start: int
    stop: int
    add: bool = False


Step: TypeAlias = Send | Recv

Schedule: TypeAlias = Sequence[Step]
"""Of one rank."""

MakeSchedule: TypeAlias = Callable[[int, int, int], list[Step]]
"""(rank, size, elems) to the schedule of that rank."""


def cuts_of(elems: int, parts: int) -> list[int]:
    """The edges of so many parts, which differ by at most one element: part i is [cuts[i], cuts[i + 1])."""
    return [elems * part // parts for part in range(parts + 1)]


@dataclass(frozen=True, slots=True)
class ScheduleCost:
    """What an algorithm costs on the critical path: seconds = alphas·α + betas·n·β + gammas·n·γ + overhead·o.

    Args:
        alphas: messages one after the other; α is the seconds that each costs, however short.
        betas: vectors sent or received one after the other; n·β is the seconds of one.
        gammas: vectors added; n·γ is the seconds of one.
        overhead: messages that a rank handles besides those, at the same time; o is the work of one. A network
            carries them at once, which is why the textbooks leave them out; a processor does not.
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
        """Of a vector of so many bytes, on a network and ranks of such figures."""
        per_byte_s = self.betas * beta_s_byte + self.gammas * gamma_s_byte
        return self.alphas * alpha_s + self.overhead * message_s + num_bytes * per_byte_s
