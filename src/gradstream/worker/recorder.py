"""Records everything that a worker is told and a replay could not find out again."""

from __future__ import annotations

from gradstream.coordinator.client.requests import Assigned
from gradstream.data.shares import WorkerSpeed
from gradstream.recording import BatchesAssigned, IntervalBegun, Log, SnapshotReached
from gradstream.wire import v1
from gradstream.worker.batch_queue import BatchSource


class WorkerRecorder:
    """Records the minibatches that a worker is assigned, and where it stands and is resumed.

    Each entry is written at once, so that none is lost if the worker is killed.

    Args:
        source: assigns minibatches.
        log: the recording; None records nothing.
    """

    def __init__(self, source: BatchSource, log: Log | None) -> None:
        self._source = source
        self._log = log

    async def assign(self, wait: bool, in_hand: int, stretch: WorkerSpeed) -> Assigned:
        """See `WorkerRequests.assign`."""
        answer = await self._source.assign(wait, in_hand, stretch)
        if self._log is not None:
            self._log.add(BatchesAssigned(tuple(answer.refs), answer.complete, answer.interval))
            self._log.flush()
        return answer

    def stood(self, begun: int, ends: bool) -> None:
        """See `BatchGate`."""
        if self._log is not None:
            self._log.add(SnapshotReached(begun, ends))
            self._log.flush()

    def interval_begun(self, begun: int, interval: v1.Interval, phase: str) -> None:
        """See `BatchGate`."""
        if self._log is not None:
            self._log.add(IntervalBegun(begun, interval.number, phase))
            self._log.flush()
