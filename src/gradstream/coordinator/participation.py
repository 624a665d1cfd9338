"""Who takes part in a run that its strategy drives, and who is held back: a pure state machine.

    held ──active──▶ in ──no longer active──▶ held, until it stands ──▶ held

The strategy says how many workers are to take part: those of the lowest ranks that are there. So one that is
lost is replaced by the first that is held back. A worker that is no longer to take part finishes the
minibatch it is in, pushes everything, and says that it stands. Only then is it known which of the minibatches
that it was handed it has not begun, and others get those.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.data.ledger import Ledger
from gradstream.wire import v1

__all__ = ["ParticipationSchedule"]


@dataclass(slots=True)
class _Interval:
    """One worker's. Nobody has begun anything when a run begins: all are held back, and stand."""

    number: int = 1
    paused: bool = True
    quiesced: bool = True


class ParticipationSchedule:
    """Knows which workers take part.

    Args:
        ledger: gives others what a worker has in hand that is held back.
        num_workers: W.
    """

    def __init__(self, ledger: Ledger, num_workers: int) -> None:
        self.phase = ""
        self.wanted = 0
        self._ledger = ledger
        self._intervals = {f"worker-{rank}": _Interval() for rank in range(num_workers)}
        for rank in range(num_workers):
            ledger.pause(rank)

    @property
    def paused(self) -> list[str]:
        """Names of the workers that are held back, by rank."""
        return [name for name, interval in self._intervals.items() if interval.paused]

    @property
    def active(self) -> list[str]:
        """Names of those that take part."""
        return [name for name, interval in self._intervals.items() if not interval.paused]

    @property
    def awaited(self) -> list[str]:
        """Who still finishes what it has begun before it stands."""
        return [name for name, interval in self._intervals.items() if not interval.quiesced]

    def set_active_workers(self, count: int, phase: str) -> None:
        """So many workers are to take part from now on."""
        self.wanted, self.phase = count, phase
        self._update()

    def quiesced(self, who: str, number: int) -> bool:
        """A worker says that all it has begun is in the model. False if that was of another interval."""
        interval = self._intervals.get(who)
        if interval is None or interval.quiesced or number != interval.number:
            return False
        interval.quiesced = True
        self._ledger.pause(_rank(who))
        self._update()
        return True

    def lost(self, who: str) -> bool:
        """A worker is gone; the ledger has heard of it. Returns whether another takes its place."""
        before = self.active
        self._intervals.pop(who, None)
        self._update()
        return any(name not in before for name in self.active)

    def dismiss(self) -> bool:
        """Nothing is left to do: all may go and find that out. Returns whether anybody was held back."""
        if not self.paused:
            return False
        self.set_active_workers(len(self._intervals), self.phase)
        return True

    def interval_of(self, who: str) -> v1.Interval:
        """A worker's, as it is told it."""
        interval = self._intervals[who]
        return v1.Interval(number=interval.number, paused=interval.paused)

    def as_notice(self) -> v1.Participation:
        """As every node is told it."""
        return v1.Participation(
            intervals={name: self.interval_of(name) for name in self._intervals}, phase=self.phase
        )

    def _update(self) -> None:
        for place, (name, interval) in enumerate(self._intervals.items()):
            if place < self.wanted and interval.paused and interval.quiesced:
                interval.paused = False
                self._ledger.resume(_rank(name))
                interval.number += 1
            elif place >= self.wanted and not interval.paused:
                interval.paused, interval.quiesced = True, False
                interval.number += 1


def _rank(name: str) -> int:
    return int(name.rpartition("-")[2])
