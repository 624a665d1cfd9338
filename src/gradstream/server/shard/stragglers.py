"""Which workers made others wait at a shard.

An update of several pushes begins when the last of them is there, so whoever waits for the update waits for the
sender of that push. No I/O and no clock: the caller passes instants in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from gradstream.server.shard.state import Apply
from gradstream.wire import v1

__all__ = ["StragglerTracker"]


class StragglerTracker:
    """Whose push came last to each chunk's latest update, when, and how long after the others."""

    def __init__(self) -> None:
        self._late_ns: Counter[tuple[str, int]] = Counter()  # by sender and chunk
        self._came_ns: dict[tuple[Hashable, int], int] = {}  # by token and chunk
        self._last: dict[int, tuple[str, int]] = {}

    def came(self, token: Hashable, chunk: int, now_ns: int) -> None:
        """Notes when a push of a chunk arrived."""
        self._came_ns[token, chunk] = now_ns

    def gone(self, token: Hashable, chunk: int) -> None:
        """Forgets a push that was answered, or whose place a retry took."""
        self._came_ns.pop((token, chunk), None)

    def completed(self, due: Apply) -> None:
        """Notes that all pushes of this update are there."""
        came = [(self._came_ns.get((held.token, due.chunk), 0), held) for held in due.update]
        last_ns, last = max(came, key=lambda pair: pair[0])
        who = last.header.sender
        self._last[due.chunk] = (who, last_ns)
        others_ns = [came_ns for came_ns, held in came if held is not last]
        if others_ns:
            self._late_ns[who, due.chunk] += last_ns - max(others_ns)

    def late_s(self) -> dict[str, float]:
        """Seconds that each sender came after all others so far, on the chunk where they were most.

        A worker with a slow link is late with its last chunks. A worker that is merely the last of many on a shared
        link is late by its own turn, and no more.
        """
        late: dict[str, float] = {}
        for (who, _), late_ns in self._late_ns.items():
            late[who] = max(late_ns / 1e9, late.get(who, 0.0))
        return late

    def waited(self, chunk: int, by: str, opened_ns: int) -> v1.Waited | None:
        """Which worker made `by`, which asked at `opened_ns`, wait for the latest update; None for nobody."""
        who, last_ns = self._last.get(chunk, (by, 0))
        if who == by or last_ns <= opened_ns:
            return None
        return v1.Waited(on=who, until_us=(last_ns - opened_ns) // 1000)
