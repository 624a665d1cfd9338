"""Who came last: for whom the answers of a shard had to wait.

An update of several contributions begins when the last of them is there, so whoever waits for it
waits for that one's sender. No I/O and no clock: instants are handed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from gradstream.server.shard.state import Apply
from gradstream.wire import v1

__all__ = ["StragglerTracker"]


class StragglerTracker:
    """Who came last to each chunk's latest update, when, and how long after the others."""

    def __init__(self) -> None:
        self._late_ns: Counter[tuple[str, int]] = Counter()  # by sender and chunk
        self._came_ns: dict[tuple[Hashable, int], int] = {}  # by token and chunk
        self._last: dict[int, tuple[str, int]] = {}

    def came(self, token: Hashable, chunk: int, now_ns: int) -> None:
        """A contribution has arrived."""
        self._came_ns[token, chunk] = now_ns

    def gone(self, token: Hashable, chunk: int) -> None:
        """It has been answered, or another took its place."""
        self._came_ns.pop((token, chunk), None)

    def completed(self, due: Apply) -> None:
        """All contributions of this update are there."""
        came = [(self._came_ns.get((held.token, due.chunk), 0), held) for held in due.update]
        last_ns, last = max(came, key=lambda pair: pair[0])
        who = last.contribution.sender
        self._last[due.chunk] = (who, last_ns)
        others_ns = [came_ns for came_ns, held in came if held is not last]
        if others_ns:
            self._late_ns[who, due.chunk] += last_ns - max(others_ns)

    def late_s(self) -> dict[str, float]:
        """By how much each sender came after all others, so far: of the chunk where that was most.

        Whose link is slow is late with its last chunks; who is merely the last of many to get through
        a link that all share is late by its own turn, and no more.
        """
        late: dict[str, float] = {}
        for (who, _), late_ns in self._late_ns.items():
            late[who] = max(late_ns / 1e9, late.get(who, 0.0))
        return late

    def waited(self, chunk: int, by: str, opened_ns: int) -> v1.Waited | None:
        """What `by`, who asked at `opened_ns`, had to wait for until the latest update; None for nobody."""
        who, last_ns = self._last.get(chunk, (by, 0))
        if who == by or last_ns <= opened_ns:
            return None
        return v1.Waited(on=who, until_us=(last_ns - opened_ns) // 1000)
