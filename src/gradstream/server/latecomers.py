"""Who came last: for whom the answers of a shard had to wait.

An update of several contributions begins when the last of them is there, so whoever waits for it
waits for that one's sender. No I/O and no clock: instants are handed in.
"""

from __future__ import annotations

from collections.abc import Hashable

from gradstream.server.shard import Apply
from gradstream.wire import v1

__all__ = ["Latecomers"]


class Latecomers:
    """The last contributor of each chunk's latest update, and when its contribution came."""

    def __init__(self) -> None:
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
        self._last[due.chunk] = (last.contribution.sender, last_ns)

    def waited(self, chunk: int, by: str, opened_ns: int) -> v1.Waited | None:
        """What `by`, who asked at `opened_ns`, had to wait for until the latest update; None for nobody."""
        who, last_ns = self._last.get(chunk, (by, 0))
        if who == by or last_ns <= opened_ns:
            return None
        return v1.Waited(on=who, until_us=(last_ns - opened_ns) // 1000)
