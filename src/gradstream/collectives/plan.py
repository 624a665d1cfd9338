"""Plans: which steps of a schedule have to wait for which, so that all others can go on at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradstream.collectives.schedule import Recv, Schedule, Send, Step

__all__ = ["DependencyPlan"]


@dataclass(frozen=True, slots=True)
class DependencyPlan:
    """A schedule, ready to be carried out.

    Args:
        steps: those of at least one element, in their order.
        after: for each, the numbers of earlier steps on some of its elements. Two sends do not
            conflict; what follows from other entries is left out.
        sends, recvs: numbers of steps by peer, in their order: what goes to one peer, or comes from
            it, goes one after the other.
    """

    steps: Sequence[Step]
    after: Sequence[Sequence[int]]
    sends: Mapping[int, Sequence[int]]
    recvs: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, schedule: Schedule) -> DependencyPlan:
        """Looks at each pair of steps once, from the later one backwards."""
        steps = [step for step in schedule if step.stop > step.start]
        return cls(
            steps,
            [_before(steps, number) for number in range(len(steps))],
            _by_peer((step.peer, number) for number, step in enumerate(steps) if isinstance(step, Send)),
            _by_peer((step.peer, number) for number, step in enumerate(steps) if isinstance(step, Recv)),
        )


def _before(steps: Sequence[Step], number: int) -> list[int]:
    step, found = steps[number], []
    for earlier in range(number - 1, -1, -1):
        other = steps[earlier]
        if isinstance(step, Send) and isinstance(other, Send):
            continue
        if max(step.start, other.start) < min(step.stop, other.stop):
            found.append(earlier)
            if isinstance(other, Recv) and other.start <= step.start and step.stop <= other.stop:
                break  # itself behind everything before it on these elements
    return found


def _by_peer(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    lanes: dict[int, list[int]] = {}
    for peer, number in pairs:
        lanes.setdefault(peer, []).append(number)
    return lanes
