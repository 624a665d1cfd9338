"""Operations of a group, and their plans: which steps wait for which others, and how far each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradstream.collectives.schedule import Recv, Schedule, Send, Step
from gradstream.errors import ConfigError


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
            conflict. Dependencies that follow from other entries are left out.
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
        plan: plan of this rank.
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
    step, found = steps[number], []
    for earlier in range(number - 1, -1, -1):
        other = steps[earlier]
        if isinstance(step, Send) and isinstance(other, Send):
            continue
        if max(step.start, other.start) < min(step.stop, other.stop):
            found.append(earlier)
            if isinstance(other, Recv) and other.start <= step.start and step.stop <= other.stop:
                break  # this receive waits itself for everything before it on these elements
    return found


def _by_peer(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    numbers: dict[int, list[int]] = {}
    for peer, number in pairs:
        numbers.setdefault(peer, []).append(number)
    return numbers
