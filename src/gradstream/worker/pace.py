"""How far a worker may go: between two minibatches a cut can hold it.

When a cut begins, a worker says how many minibatches it has begun, and begins no further one. Told
where to stop, it goes on up to there, pushes everything that it has computed, and says so. It stands
until the cut lets go of it. A worker that has nothing to do stands already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gradstream.wire import v1

__all__ = ["Pace"]


class Pace:
    """The gate before each minibatch. No I/O: notices go in, reports come out.

    Args:
        worker: this node's name.
        report: called with what this worker has to say about a cut.
        on_stand: called when a cut has made it stand: with the number of minibatches begun, and whether it
            will begin no further one.
    """

    def __init__(
        self,
        worker: str,
        report: Callable[[v1.CutReport], None],
        on_stand: Callable[[int, bool], None] = lambda begun, ends: None,
    ) -> None:
        self.begun = 0
        self._on_stand = on_stand
        self._worker = worker
        self._report = report
        self._cut = v1.Cut()
        self._limit: int | None = None  # minibatches that may be begun; None for any number
        self._standing = False  # everything that was begun is in the model
        self._said: tuple[int, int] = (0, -1)  # (cut, kind) of the last report
        self._changed = asyncio.Event()

    def hear(self, notice: v1.Notice) -> None:
        """Takes in what the coordinator says."""
        if notice.phase == v1.Notice.STOPPED:
            return  # who stands still for the last cut begins nothing that nobody would hear of
        self._cut = cut = notice.cut if notice.HasField("cut") else v1.Cut()
        holds = cut.number > 0 and (cut.phase != v1.Cut.WRITE or cut.last)
        self._limit = cut.stop_at.get(self._worker, self.begun) if holds else None
        if holds and cut.phase == v1.Cut.PAUSE:
            self._say(v1.CutReport.BEGUN)
        self._say_if_reached()
        self._changed.set()

    @property
    def ending(self) -> bool:
        """Whether it is known after which minibatch the run ends."""
        return self._cut.ends and self._cut.phase != v1.Cut.PAUSE

    @property
    def settled(self) -> bool:
        """Whether all that workers had begun is in the model, if they were told where the run ends."""
        return not self._cut.ends or self._cut.phase == v1.Cut.ENDED

    async def gate(self, flush: Callable[[], Awaitable[None]]) -> bool:
        """Returns True when the next minibatch may be begun, and counts it; False when the run ends here.

        Args:
            flush: puts everything that was computed into the model.
        """
        while self._limit is not None and self.begun >= self._limit:
            if not self._standing:
                await flush()
                self._on_stand(self.begun, False)
                self.stand()
                continue  # the cut may have let go meanwhile
            if self.ending:
                self._on_stand(self.begun, True)
                return False
            self._changed.clear()
            await self._changed.wait()
        self._standing = False
        self.begun += 1
        return True

    def skip(self, count: int) -> None:
        """So many minibatches will not be begun: the rounds they were for are over. They count as begun."""
        self.begun += count

    def stand(self) -> None:
        """Everything that was begun is in the model, and nothing more is begun without passing the gate."""
        self._standing = True
        self._say_if_reached()

    def _say_if_reached(self) -> None:
        told = self._cut.number > 0 and self._cut.phase in (v1.Cut.STOP, v1.Cut.SNAPSHOT)
        if told and self._standing and self._limit is not None and self.begun >= self._limit:
            self._say(v1.CutReport.REACHED)

    def _say(self, kind: v1.CutReport.Kind) -> None:
        if self._said != (self._cut.number, kind):
            self._said = (self._cut.number, kind)
            self._report(v1.CutReport(number=self._cut.number, kind=kind, count=self.begun))
