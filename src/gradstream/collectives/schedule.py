"""Schedules: what each rank sends and receives, as data.

A schedule is one rank's list of steps on its vector, which is combined in place. The steps take effect as if
they ran one after the other, in the order listed. But a step has to wait only for earlier steps on the same
elements, so that an executor may run the others at the same time, and a long step piece by piece. What one
rank sends to another arrives in the order sent.

A schedule is made by a pure function of (rank, size, elems), one for each algorithm, in
`gradstream.collectives.algorithms`. `tests/kit/schedule_checks.py` executes the schedules of all ranks
on plain arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gradstream.errors import ConfigError

# ---- schedule ----------------------------------------------------------------------------


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


# ---- plan --------------------------------------------------------------------------------
# Operations of a group, and their plans: which steps wait for which others, and how far each of them is.


@dataclass(frozen=True, slots=True)
class Operation:
    """Identifies one operation, so that a rank refuses chunks of another one.

    Args:
        number: number of the operation in its group.
        digest: checksum of `text`.
        text: what the ranks do, for messages.
    """

    number: int
    digest: int
    text: str

    def mismatch(self, peer: str, number: int) -> ConfigError:
        """The error to raise if a peer is in another operation, the one with its number `number`."""
        return ConfigError(
            f"{self.text} is this rank's operation {self.number} of the group, but {peer} does another "
            f"(its number {number}): all ranks must call the same operations in the same order, with as "
            "many elements"
        )


@dataclass(frozen=True, slots=True)
class DependencyPlan:
    """A schedule with its dependencies. Steps that do not depend on each other may run at the same time.

    Args:
        steps: the steps of at least one element, in the order of the schedule.
        after: for each step, the numbers of earlier steps that touch some of its elements. Two sends do not
            conflict. Dependencies that follow from other entries are skipped.
        sends: for each peer, the numbers of the steps that send to it, in order. They run one after the other.
        recvs: for each peer, the numbers of the steps that receive from it, in order.
    """

    steps: Sequence[Step]
    after: Sequence[Sequence[int]]
    sends: Mapping[int, Sequence[int]]
    recvs: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, schedule: Schedule) -> DependencyPlan:
        """Derives the plan of a schedule."""
        steps = [step for step in schedule if step.stop > step.start]
        return cls(
            steps,
            [_before(steps, number) for number in range(len(steps))],
            _by_peer((step.peer, number) for number, step in enumerate(steps) if isinstance(step, Send)),
            _by_peer((step.peer, number) for number, step in enumerate(steps) if isinstance(step, Recv)),
        )


class PlanProgress:
    """How far each step of a plan is, and how far it may go. Drivers move the bytes and report here.

    A position counts units along the vector. A unit is an element, or a byte for a driver that may stop in
    the middle of an element.

    Args:
        piece_elems: the most elements that a driver moves or adds at once.
        unit: units of one element.

    Attributes:
        piece: length of a piece, in units.
        passed: for each step, the position up to which it is done.
    """

    def __init__(self, plan: DependencyPlan, piece_elems: int, unit: int = 1) -> None:
        self.plan = plan
        self.unit = unit
        self.piece = max(1, piece_elems) * unit
        self.passed = [step.start * unit for step in plan.steps]
        self._stops = [step.stop * unit for step in plan.steps]
        self._early: list[dict[int, int]] = [{} for _ in plan.steps]  # pieces behind `passed` that are done

    def finish(self, number: int, start: int, stop: int) -> None:
        """Notes that [start, stop) of a step is done, before or after the pieces beside it."""
        early = self._early[number]
        early[start] = stop
        while (end := early.pop(self.passed[number], None)) is not None:
            self.passed[number] = end

    def limit(self, number: int) -> int:
        """The position up to which a step may go: earlier steps are done with the elements below it."""
        low = self._stops[number]
        for earlier in self.plan.after[number]:
            if self.passed[earlier] < self._stops[earlier]:
                low = min(low, self.passed[earlier])
        return low

    def bounds(self, number: int) -> tuple[int, int]:
        """[start, stop) of a step, as positions."""
        return self.plan.steps[number].start * self.unit, self._stops[number]

    def pieces(self, numbers: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """(step, start, stop) of each piece of these steps. Sender and receiver cut a step alike."""
        for number in numbers:
            first, last = self.bounds(number)
            for start in range(first, last, self.piece):
                yield number, start, min(start + self.piece, last)


def _before(steps: Sequence[Step], number: int) -> list[int]:
    step, dependencies = steps[number], []
    for earlier in range(number - 1, -1, -1):
        other = steps[earlier]
        if isinstance(step, Send) and isinstance(other, Send):
            continue
        if max(step.start, other.start) < min(step.stop, other.stop):
            dependencies.append(earlier)
            if isinstance(other, Recv) and other.start <= step.start and step.stop <= other.stop:
                break  # this receive waits itself for everything before it on these elements
    return dependencies


def _by_peer(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    numbers: dict[int, list[int]] = {}
    for peer, number in pairs:
        numbers.setdefault(peer, []).append(number)
    return numbers
