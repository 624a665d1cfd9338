"""Which workers take part in a run whose strategy decides it: a pure state machine.

    paused, quiesced ──wanted──▶ active ──no longer wanted──▶ paused ──has pushed all──▶ paused, quiesced

The strategy says how many workers take part: those of the lowest ranks that are in. So the first paused
worker replaces a lost one. A worker that is to pause finishes its present minibatch, pushes everything, and
reports that it is quiesced. Only then is it known which of its minibatches it has not begun; other workers
get those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradstream.coordinator.lead import WORKERS, Emit, Instruction, Lead, Lost, Notify
from gradstream.coordinator.progress import SampleProgress
from gradstream.data.ledger import Ledger
from gradstream.telemetry.events import ParticipationEvent
from gradstream.wire import v1


@dataclass(slots=True)
class Interval:
    """The present interval of a worker. When a run begins, all workers are paused and quiesced."""

    number: int = 1
    paused: bool = True
    quiesced: bool = True


class ParticipationSchedule(Lead):
    """Decides which workers take part.

    Args:
        progress: counts the samples in the model. Its ledger gives the minibatches of paused workers to others.
        num_workers: number of workers.

    Attributes:
        phase: the strategy's word for its present phase.
        wanted: how many workers are to take part.
    """

    KEPT = ("phase", "wanted", "_intervals")
    """See `durable.state`."""

    REPORTS: ClassVar = {"quiesced": WORKERS}

    def __init__(self, progress: SampleProgress, num_workers: int) -> None:
        assert isinstance(progress.ledger, Ledger)
        self.phase = ""
        self.wanted = 0
        self._progress = progress
        self._leases = leases = progress.ledger.leases
        self._intervals = {f"worker-{rank}": Interval() for rank in range(num_workers)}
        for rank in range(num_workers):
            leases.pause(rank)

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

    def set_active_workers(self, count: int, phase: str) -> list[Instruction]:
        """Lets `count` workers take part from now on. `phase` is the strategy's word for that."""
        self.wanted, self.phase = count, phase
        self._update()
        return self._changed()

    def on_report(self, node: v1.Node, kind: str, report: int, at_s: float) -> list[Instruction]:
        """Notes that a worker has pushed all that it had begun. That of another interval changes nothing."""
        interval = self._intervals.get(node.name)
        if interval is None or interval.quiesced or report != interval.number:
            return []
        interval.quiesced = True
        self._leases.pause(node.rank)
        self._update()
        return [Notify()]

    def on_lost(self, lost: Lost, at_s: float) -> list[Instruction]:
        """Removes a lost worker, whose minibatches were taken back. Tells if another worker replaces it."""
        before = self.active
        self._remove(lost.worker)
        return self._changed() if any(name not in before for name in self.active) else []

    def on_absent(self, rank: int) -> list[Instruction]:
        """Removes a worker that has not come."""
        self._remove(f"worker-{rank}")
        return []

    def _remove(self, worker: str) -> None:
        self._intervals.pop(worker, None)
        self._update()

    def on_join(self, node: v1.Node, at_s: float) -> list[Instruction]:
        """Adds a worker in the place of a lost one, paused. Tells if it takes part at once."""
        if node.role != "worker":
            return []
        self._intervals[node.name] = Interval()
        self._intervals = dict(sorted(self._intervals.items(), key=lambda one: _rank(one[0])))
        self._leases.pause(node.rank)
        self._update()
        return [] if self._intervals[node.name].paused else self._changed()

    def on_complete(self) -> list[Instruction]:
        """Resumes all workers, so that they learn that nothing is left to do."""
        if not self.paused:
            return []
        self.wanted = len(self._intervals)
        self._update()
        return [Notify()]

    def interval_of(self, who: str) -> v1.Interval:
        """Returns the interval of a worker as notices contain it."""
        interval = self._intervals[who]
        return v1.Interval(number=interval.number, paused=interval.paused)

    def notice(self, notice: v1.Notice) -> None:
        """Adds the intervals of all workers."""
        intervals = {name: self.interval_of(name) for name in self._intervals}
        notice.participation.CopyFrom(v1.Participation(intervals=intervals, phase=self.phase))

    def _changed(self) -> list[Instruction]:
        """Reports which workers take part now."""
        event = ParticipationEvent(
            phase=self.phase, active=self.active, paused=self.paused, samples=self._progress.num_samples
        )
        return [Emit(event), Notify()]

    def _update(self) -> None:
        for place, (name, interval) in enumerate(self._intervals.items()):
            if place < self.wanted and interval.paused and interval.quiesced:
                interval.paused = False
                self._leases.resume(_rank(name))
                interval.number += 1
            elif place >= self.wanted and not interval.paused:
                interval.paused, interval.quiesced = True, False
                interval.number += 1


def _rank(name: str) -> int:
    return int(name.rpartition("-")[2])
