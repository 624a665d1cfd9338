"""Which workers take part in a run whose strategy decides it: a pure state machine.

    paused, quiesced ──wanted──▶ active ──no longer wanted──▶ paused ──has pushed all──▶ paused, quiesced

The strategy says how many workers take part: those of the lowest ranks that are in. So the first paused
worker replaces a lost one. A worker that is to pause finishes its present minibatch, pushes everything, and
reports that it is quiesced. Only then is it known which of its minibatches it has not begun; other workers
get those.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.data.hands import Hands
from gradstream.wire import v1


@dataclass(slots=True)
class Interval:
    """The present interval of a worker. When a run begins, all workers are paused and quiesced."""

    number: int = 1
    paused: bool = True
    quiesced: bool = True


class ParticipationSchedule:
    """Decides which workers take part.

    Args:
        hands: gives the minibatches of paused workers to others.
        num_workers: number of workers.

    Attributes:
        phase: the strategy's word for its present phase.
        wanted: how many workers are to take part.
    """

    KEPT = ("phase", "wanted", "_intervals")
    """See `durable.state`."""

    def __init__(self, hands: Hands, num_workers: int) -> None:
        self.phase = ""
        self.wanted = 0
        self._hands = hands
        self._intervals = {f"worker-{rank}": Interval() for rank in range(num_workers)}
        for rank in range(num_workers):
            hands.pause(rank)

    @property
    def paused(self) -> list[str]:
        """Names of the paused workers, by rank."""
        return [name for name, interval in self._intervals.items() if interval.paused]

    @property
    def active(self) -> list[str]:
        """Names of the workers that take part, by rank."""
        return [name for name, interval in self._intervals.items() if not interval.paused]

    @property
    def awaited(self) -> list[str]:
        """Names of the workers that are paused and not quiesced yet."""
        return [name for name, interval in self._intervals.items() if not interval.quiesced]

    def set_active_workers(self, count: int, phase: str) -> None:
        """Lets `count` workers take part from now on."""
        self.wanted, self.phase = count, phase
        self._update()

    def quiesced(self, who: str, number: int) -> bool:
        """Notes that a worker has pushed all that it had begun. Returns False for another interval."""
        interval = self._intervals.get(who)
        if interval is None or interval.quiesced or number != interval.number:
            return False
        interval.quiesced = True
        self._hands.pause(_rank(who))
        self._update()
        return True

    def lost(self, who: str) -> bool:
        """Removes a lost worker, whose minibatches were taken back. Returns whether another worker replaces it."""
        before = self.active
        self._intervals.pop(who, None)
        self._update()
        return any(name not in before for name in self.active)

    def joined(self, who: str) -> bool:
        """Adds a worker in the place of a lost one, paused. Returns whether it takes part at once."""
        self._intervals[who] = Interval()
        self._intervals = dict(sorted(self._intervals.items(), key=lambda one: _rank(one[0])))
        self._hands.pause(_rank(who))
        self._update()
        return not self._intervals[who].paused

    def dismiss(self) -> bool:
        """Resumes all workers, so that they learn that nothing is left to do. Returns whether any was paused."""
        if not self.paused:
            return False
        self.set_active_workers(len(self._intervals), self.phase)
        return True

    def interval_of(self, who: str) -> v1.Interval:
        """Returns the interval of a worker as notices contain it."""
        interval = self._intervals[who]
        return v1.Interval(number=interval.number, paused=interval.paused)

    def as_notice(self) -> v1.Participation:
        """Returns the intervals of all workers as notices contain them."""
        return v1.Participation(
            intervals={name: self.interval_of(name) for name in self._intervals}, phase=self.phase
        )

    def _update(self) -> None:
        for place, (name, interval) in enumerate(self._intervals.items()):
            if place < self.wanted and interval.paused and interval.quiesced:
                interval.paused = False
                self._hands.resume(_rank(name))
                interval.number += 1
            elif place >= self.wanted and not interval.paused:
                interval.paused, interval.quiesced = True, False
                interval.number += 1


def _rank(name: str) -> int:
    return int(name.rpartition("-")[2])
