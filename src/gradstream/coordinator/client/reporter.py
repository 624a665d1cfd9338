"""`Reporter`: gathers the reports of a node until they go to the coordinator in a beat."""

from __future__ import annotations

from collections.abc import Iterable

from gradstream.coordinator.presence_service import in_beats
from gradstream.coordinator.progress import receipt_of
from gradstream.coordinator.relay import RunClock
from gradstream.data.base import BatchRef
from gradstream.runtime.tasks import Wakeup
from gradstream.telemetry.events import Event, encode
from gradstream.wire import v1


class Reporter:
    """Takes the reports of one node. They go out in the next beat, in order and each once.

    Args:
        name: name of the node.
        clock: time of its events.

    Attributes:
        beat: the next beat, without its events.
        num_receipts: number of receipts so far.
    """

    def __init__(self, name: str, clock: RunClock) -> None:
        self.beat = v1.Beat()
        self._name = name
        self._clock = clock
        self._events: list[bytes] = []
        self._urgent = Wakeup()
        self.num_receipts = 0

    def emit(self, event: Event) -> None:
        """Adds a record to the events of the run."""
        self._events.append(encode(event, node=self._name, time_s=self._clock.time_s()))

    @property
    def coordinator_comes_back(self) -> bool:
        """Whether a new process takes the place of a coordinator that has died."""
        return False

    def hurry(self) -> None:
        """Sends the next beat at once."""
        self._urgent.ring()

    def receipt(self, refs: Iterable[BatchRef]) -> None:
        """Reports minibatches that are in the model: all shards have acknowledged their pushes."""
        before = len(self.beat.receipts)
        self.beat.receipts.extend(receipt_of(ref) for ref in refs)
        self.num_receipts += len(self.beat.receipts) - before

    def receipt_soon(self, refs: Iterable[BatchRef]) -> None:
        """Reports them at once: other workers may wait for them."""
        self.receipt(refs)
        self._urgent.ring()

    def report(self, report: v1.BeatReport, *, soon: bool = True) -> None:
        """Reports what the coordinator's half of a feature has to know.

        Args:
            report: goes out behind the receipts so far.
            soon: send the next beat at once.
        """
        self.beat.reports.append(report)
        if soon:
            self._urgent.ring()

    def finished(self, *, relies: bool = False) -> None:
        """Reports that the strategy of this worker is done with all its minibatches.

        Args:
            relies: this worker relies on another one to write the final parameters.
        """
        self.beat.finished, self.beat.relies = True, relies
        self._urgent.ring()

    @property
    def _has_news(self) -> bool:
        """Whether the next beat should not wait until the coordinator needs a sign of life."""
        beat = self.beat
        return bool(self._events or beat.receipts or beat.finished or beat.reports)

    def _take_beats(self) -> list[v1.Beat]:
        """Returns what was gathered, as beats of the size that the coordinator accepts."""
        beat, self.beat = self.beat, v1.Beat()
        *earlier, beat.events = in_beats(self._events)
        self._events = []
        return [*(v1.Beat(events=events) for events in earlier), beat]
