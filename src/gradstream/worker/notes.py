"""What a worker is told and could not find out again: noted, so that the run can be repeated."""

from __future__ import annotations

from gradstream.membership.member import Left
from gradstream.recording import Log, Orphans, Stood, Turned
from gradstream.wire import v1
from gradstream.worker.schedule import OrphanSource

__all__ = ["Notes"]


class Notes:
    """Asks for minibatches of lost workers, and notes the answers; notes where it stood, and was let in.

    All are rare, and written at once: nothing is lost with a worker that is killed.

    Args:
        source: answers.
        log: None notes nothing.
    """

    def __init__(self, source: OrphanSource, log: Log | None) -> None:
        self._source = source
        self._log = log

    async def orphans(self, epoch: int, last: bool) -> Left:
        """See `OrphanSource`."""
        left = await self._source.orphans(epoch, last)
        if self._log is not None:
            self._log.add(Orphans(tuple(left.refs), left.complete, left.turn))
            self._log.flush()
        return left

    def stood(self, begun: int, ends: bool) -> None:
        """See `Pace`."""
        if self._log is not None:
            self._log.add(Stood(begun, ends))
            self._log.flush()

    def turned(self, begun: int, turn: v1.Turn, phase: str) -> None:
        """See `Pace`."""
        if self._log is not None:
            self._log.add(Turned(begun, turn.number, turn.first, phase))
            self._log.flush()
