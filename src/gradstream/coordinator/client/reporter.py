"""`Reporter`: gathers the reports of a node until they go to the coordinator in a beat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

    def estate(self, estate: v1.Estate) -> None:
        """Reports at once which pushes of a lost worker this shard's chunks have applied."""
        self.beat.estates.append(estate)
        self._urgent.ring()

    def backed_up(self, incarnation: int) -> None:
        """Reports at once that this process of another shard has a backup of all chunks of this one."""
        self.beat.backed_up = incarnation
        self._urgent.ring()

    def broken(self, epoch: int) -> None:
        """Reports at once that the group of this epoch has failed, although all its workers are there."""
        self.beat.broken = epoch
        self._urgent.ring()

    def resharded(self, first: int, error: str = "") -> None:
        """Reports at once that this shard of a new placement has its chunks; or, in `error`, why it cannot get them.

        Args:
            first: lowest rank of the placement's shards.
            error: "" if it has them.
        """
        self.beat.resharded.CopyFrom(v1.Resharded(first=first, error=error))
        self._urgent.ring()

    def redone(self, done: v1.Redone) -> None:
        """Reports at once that every chunk has a lost worker's push, which this worker has redone."""
        self.beat.redone.append(done)
        self._urgent.ring()

    def refused(self, refused: v1.Refused) -> None:
        """Reports at once a gradient that is not in the model, and is not going to be."""
        self.beat.refused.append(refused)
        self.beat.sound = False
        self._urgent.ring()

    def sound(self) -> None:
        """Reports that this worker's newest gradient is finite, after others that were not."""
        self.beat.sound = True

    def report(self, report: v1.SnapshotReport) -> None:
        """Reports at once how far this node is with a snapshot. Earlier receipts go out in the same beat."""
        self.beat.snapshots.append(report)
        self._urgent.ring()

    def quiesced(self, number: int) -> None:
        """Reports that this worker, paused in interval `number`, has pushed all that it had begun."""
        self.beat.quiesced = number
        self._urgent.ring()

    def hand_over(self, handed: v1.HandOver) -> None:
        """Reports that this worker computes no part of a lost worker from a round on."""
        self.beat.handed.append(handed)
        self._urgent.ring()

    def verdict(self, round: int, ranks: Sequence[int]) -> None:  # noqa: A002  the word of the protocol
        """Reports that the update of a round was made of the gradients of these ranks."""
        self.beat.verdicts.append(v1.Verdict(round=round, ranks=ranks))

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
        return bool(
            self._events
            or beat.receipts
            or beat.verdicts
            or beat.finished
            or beat.snapshots
            or beat.quiesced
            or beat.estates
            or beat.redone
            or beat.backed_up
            or beat.broken
            or beat.HasField("resharded")
            or beat.handed
            or beat.refused
            or beat.sound
        )

    def _take_beats(self) -> list[v1.Beat]:
        """Returns what was gathered, as beats of the size that the coordinator accepts."""
        beat, self.beat = self.beat, v1.Beat()
        *earlier, beat.events = in_beats(self._events)
        self._events = []
        return [*(v1.Beat(events=events) for events in earlier), beat]
