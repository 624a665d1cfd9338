"""The gate that a worker passes before each minibatch, where snapshots stop it.

When a snapshot begins, a worker reports how many minibatches it has begun, and pauses. The coordinator tells it where
to stop. The worker continues to that point, flushes everything that it has computed into the model, and reports. It
then stands still until the snapshot releases it. A worker that has nothing to do stands still already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

from gradstream.wire import v1

Gate: TypeAlias = Literal["go", "over"]
"""Answer of the gate: begin the minibatch; or the run ends here."""


class _SnapshotStop:
    """Where a snapshot stops a worker.

    Args:
        worker: name of the worker's node.
        report: sends a report about a snapshot to the coordinator.
    """

    def __init__(self, worker: str, report: Callable[[v1.BeatReport], None]) -> None:
        self.snapshot = v1.Snapshot()
        self._worker = worker
        self._report = report
        self._limit: int | None = None  # number of minibatches that may be begun; None for no limit
        self._reported: tuple[int, int] = (0, -1)  # snapshot and kind of the last report

    def hear(self, notice: v1.Notice, begun: int) -> None:
        """Handles the coordinator's news on snapshots, for a worker that has begun this many minibatches."""
        self.snapshot = snapshot = notice.snapshot if notice.HasField("snapshot") else v1.Snapshot()
        stops = snapshot.number > 0 and (snapshot.stage != v1.Snapshot.WRITE or snapshot.last)
        self._limit = snapshot.stop_at.get(self._worker, begun) if stops else None
        if stops and snapshot.stage == v1.Snapshot.PAUSE:
            self._say(v1.SnapshotReport.BEGUN, begun)

    def at_limit(self, begun: int) -> bool:
        """Whether a worker that has begun this many minibatches has to stop."""
        return self._limit is not None and begun >= self._limit

    def stands(self, begun: int) -> None:
        """Reports that the worker stands still, if the snapshot waits for that."""
        waits = self.snapshot.stage in (v1.Snapshot.STOP, v1.Snapshot.SNAPSHOT)
        if waits and self.snapshot.number > 0 and self.at_limit(begun):
            self._say(v1.SnapshotReport.REACHED, begun)

    def _say(self, kind: v1.SnapshotReport.Kind, begun: int) -> None:
        if self._reported != (self.snapshot.number, kind):
            self._reported = (self.snapshot.number, kind)
            report = v1.SnapshotReport(number=self.snapshot.number, kind=kind, count=begun)
            self._report(v1.BeatReport(snapshot=report))


class BatchGate:
    """The gate before each minibatch of a worker. No I/O: notices come in, reports go out.

    Args:
        worker: name of the worker's node.
        report: sends a report to the coordinator.
        on_stand: called when a snapshot has stopped the worker, with the number of minibatches begun, and whether it
            will begin no more.

    Attributes:
        begun: number of minibatches that the worker has begun.
        flush_others: awaited before the worker stands still: flushes into the model what the other processes of its
            replica have computed. None if there are none.
    """

    def __init__(
        self,
        worker: str,
        report: Callable[[v1.BeatReport], None],
        on_stand: Callable[[int, bool], None] = lambda begun, ends: None,
    ) -> None:
        self.begun = 0
        self.flush_others: Callable[[], Awaitable[None]] | None = None
        self._stop = _SnapshotStop(worker, report)
        self._on_stand = on_stand
        self._standing = False  # everything that was begun is in the model
        self._leave: Callable[[], None] | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def leave(self, then: Callable[[], None]) -> None:
        """Stops the worker, and calls `then` once every minibatch that it has begun is in the model."""
        self._leave = then
        self._report_standing()
        self._changed.set()

    def interrupt(self, error: Exception) -> None:
        """Makes `gate` raise this error, even for a worker that waits there, until `again` is called."""
        self._error = error
        self._changed.set()

    def again(self, begun: int) -> None:
        """Lets the worker continue after `interrupt`. It has dropped its current minibatch, if any."""
        self._error, self.begun = None, begun

    def hear(self, notice: v1.Notice) -> None:
        """Takes in a notice of the coordinator."""
        if notice.status == v1.Notice.STOPPED:
            return  # a worker that stands for the last snapshot must begin no minibatch that nobody would count
        self._stop.hear(notice, self.begun)
        self._report_standing()
        self._changed.set()

    @property
    def ending(self) -> bool:
        """Whether the coordinator has announced after which minibatch the run ends."""
        return self._stop.snapshot.ends and self._stop.snapshot.stage != v1.Snapshot.PAUSE

    @property
    def settled(self) -> bool:
        """Whether every minibatch begun is in the model, once the workers know where the run ends."""
        return not self._stop.snapshot.ends or self._stop.snapshot.stage == v1.Snapshot.ENDED

    async def gate(self, flush: Callable[[], Awaitable[None]]) -> Gate:
        """Returns when the next minibatch may be begun, and counts it if it is.

        Args:
            flush: brings everything that was computed into the model.

        Raises:
            Exception: see `interrupt`.
        """
        while True:
            if self._error is not None:
                raise self._error
            at_limit = self._stop.at_limit(self.begun)
            if not at_limit and self._leave is None:
                break
            if not self._standing:
                await flush()
                self._on_stand(self.begun, False)
                self.stand()
            elif at_limit and self.ending:
                self._on_stand(self.begun, True)
                return "over"
            else:
                self._changed.clear()
                await self._changed.wait()
        self._standing = False
        self.begun += 1
        return "go"

    async def asked(self) -> None:
        """Returns when the worker has to stop at the gate. Raises as `gate`."""
        while self._error is None and not self._stop.at_limit(self.begun):
            if self._leave is not None:
                return
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    def skip(self, count: int) -> None:
        """Skips minibatches of rounds that are over. They count as begun."""
        self.begun += count

    def stand(self) -> None:
        """Notes that every minibatch begun is in the model."""
        self._standing = True
        self._report_standing()

    def _report_standing(self) -> None:
        if not self._standing:
            return
        self._stop.stands(self.begun)
        if self._leave is not None:
            self._leave()
