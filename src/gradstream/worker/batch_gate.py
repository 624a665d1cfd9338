"""How far a worker may go: between two minibatches a cut can hold it.

When a cut begins, a worker says how many minibatches it has begun, and begins no further one. Told
where to stop, it goes on up to there, pushes everything that it has computed, and says so. It stands
until the cut lets go of it. A worker that has nothing to do stands already.

Where the strategy says who takes part, a worker may be held back besides, for as long as it takes. It
stands then, too; let in, it chooses its next minibatch anew, since others may have taken some of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

from gradstream.wire import v1

__all__ = ["BatchGate", "Gate"]

Gate: TypeAlias = Literal["go", "anew", "over"]
"""At the gate: begin the minibatch; or choose another one first, since this may be somebody else's by now;
or the run ends here."""


class BatchGate:
    """The gate before each minibatch. No I/O: notices go in, reports come out.

    Args:
        worker: this node's name.
        report: called with what this worker has to say about a cut.
        stands: called when it stands because it is held back, with the number of its turn.
        on_stand: called when a cut, or being held back, has made it stand: with the number of minibatches
            begun, and whether it will begin no further one.
        on_turn: called when it is let in, or has come to another phase: with the same number, its turn, and
            the phase.
    """

    def __init__(
        self,
        worker: str,
        report: Callable[[v1.SnapshotReport], None],
        stands: Callable[[int], None],
        on_stand: Callable[[int, bool], None] = lambda begun, ends: None,
        on_turn: Callable[[int, v1.Interval, str], None] = lambda begun, turn, phase: None,
    ) -> None:
        self.begun = 0
        self.phase = ""  # of the strategy, as of the minibatch that was begun last
        self.turns = 0  # how often this worker was let in, or has come to another phase
        self._on_stand = on_stand
        self._on_turn = on_turn
        self._worker = worker
        self._report = report
        self._report_standing = stands
        self._drive = v1.Participation()
        self._turn = v1.Interval()  # of this worker, as told
        self._number = 0  # of the turn that it has gone through the gate in
        self._stood = 0  # number of the turn that it has said to stand in
        self._cut = v1.Snapshot()
        self._limit: int | None = None  # minibatches that may be begun; None for any number
        self._standing = False  # everything that was begun is in the model
        self._said: tuple[int, int] = (0, -1)  # (cut, kind) of the last report
        self._changed = asyncio.Event()

    def hear(self, notice: v1.Notice) -> None:
        """Takes in what the coordinator says."""
        if notice.phase == v1.Notice.STOPPED:
            return  # who stands still for the last cut begins nothing that nobody would hear of
        self._cut = cut = notice.snapshot if notice.HasField("snapshot") else v1.Snapshot()
        holds = cut.number > 0 and (cut.phase != v1.Snapshot.WRITE or cut.last)
        self._limit = cut.stop_at.get(self._worker, self.begun) if holds else None
        if holds and cut.phase == v1.Snapshot.PAUSE:
            self._say(v1.SnapshotReport.BEGUN)
        self._drive = notice.participation
        self._turn = notice.participation.intervals.get(self._worker, v1.Interval())
        self._say_if_standing()
        self._changed.set()

    @property
    def ending(self) -> bool:
        """Whether it is known after which minibatch the run ends."""
        return self._cut.ends and self._cut.phase != v1.Snapshot.PAUSE

    @property
    def settled(self) -> bool:
        """Whether all that workers had begun is in the model, if they were told where the run ends."""
        return not self._cut.ends or self._cut.phase == v1.Snapshot.ENDED

    @property
    def driven(self) -> bool:
        """Whether the strategy says who takes part, and when."""
        return self._turn.number > 0

    @property
    def turn(self) -> v1.Interval:
        """That this worker was let in by last: since then its own line goes on at `first`."""
        return self._turn

    async def gate(self, flush: Callable[[], Awaitable[None]]) -> Gate:
        """Returns when the next minibatch may be begun, and counts it if it is.

        Args:
            flush: puts everything that was computed into the model.
        """
        while True:
            if self._at_limit or self._turn.paused:
                if not self._standing:
                    await flush()
                    self._on_stand(self.begun, False)
                    self.stand()
                elif self._at_limit and self.ending:
                    self._on_stand(self.begun, True)
                    return "over"
                else:
                    self._changed.clear()
                    await self._changed.wait()
            elif self._number != self._turn.number:
                self._number, self.phase = self._turn.number, self._drive.phase
                self.turns += 1
                self._on_turn(self.begun, self._turn, self.phase)
                return "anew"
            elif self.phase != self._drive.phase:
                phase = self._drive.phase
                await flush()  # what a phase has computed is in the model when the next one begins
                self.phase = phase
                self.turns += 1
                self._on_turn(self.begun, self._turn, phase)
            else:
                break
        self._standing = False
        self.begun += 1
        return "go"

    def skip(self, count: int) -> None:
        """So many minibatches will not be begun: the rounds they were for are over. They count as begun."""
        self.begun += count

    def stand(self) -> None:
        """Everything that was begun is in the model, and nothing more is begun without passing the gate."""
        self._standing = True
        self._say_if_standing()

    @property
    def _at_limit(self) -> bool:
        return self._limit is not None and self.begun >= self._limit

    def _say_if_standing(self) -> None:
        """Says so to the cut that waits for it, and to the drive that holds it back."""
        self._say_if_reached()
        if self._standing and self._turn.paused and self._stood != self._turn.number:
            self._stood = self._turn.number
            self._report_standing(self._turn.number)

    def _say_if_reached(self) -> None:
        told = self._cut.number > 0 and self._cut.phase in (v1.Snapshot.STOP, v1.Snapshot.SNAPSHOT)
        if told and self._standing and self._limit is not None and self.begun >= self._limit:
            self._say(v1.SnapshotReport.REACHED)

    def _say(self, kind: v1.SnapshotReport.Kind) -> None:
        if self._said != (self._cut.number, kind):
            self._said = (self._cut.number, kind)
            self._report(v1.SnapshotReport(number=self._cut.number, kind=kind, count=self.begun))
