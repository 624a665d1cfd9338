"""Finds the workers that make others wait at a shard.

An update of several pushes begins when the last of them has arrived, so a node that waits for the update waits for
the sender of that push. No I/O and no clock: the caller passes times in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from gradstream.server.shard.instructions import Apply
from gradstream.wire import v1


class StragglerTracker:
    """Records which worker's push came last for each update of a chunk, and how much later than the others'."""

    def __init__(self) -> None:
        self._late_ns: Counter[tuple[str, int]] = Counter()  # by sender and chunk
        self._came_ns: dict[tuple[Hashable, int], int] = {}  # by token and chunk
        self._last: dict[int, tuple[str, int]] = {}  # by chunk: sender of the last push, and its time

    def came(self, token: Hashable, chunk: int, now_ns: int) -> None:
        """Notes the time at which a push of a chunk arrived."""
        self._came_ns[token, chunk] = now_ns

    def gone(self, token: Hashable, chunk: int) -> None:
        """Forgets a push that was answered, or that a retry has replaced."""
        self._came_ns.pop((token, chunk), None)

    def completed(self, due: Apply) -> None:
        """Notes that all pushes of an update have arrived."""
        came = [(self._came_ns.get((held.token, due.chunk), 0), held) for held in due.update]
        last_ns, last = max(came, key=lambda pair: pair[0])
        sender = last.header.sender
        self._last[due.chunk] = (sender, last_ns)
        others_ns = [came_ns for came_ns, held in came if held is not last]
        if others_ns:
            self._late_ns[sender, due.chunk] += last_ns - max(others_ns)

    def late_s(self) -> dict[str, float]:
        """By sender, the seconds by which its pushes came after all others so far, on the chunk with most seconds.

        A worker with a slow link is late with its last chunks. A worker that is only the last of many on a shared
        link is late by the time of its own transfer.
        """
        late: dict[str, float] = {}
        for (sender, _), late_ns in self._late_ns.items():
            late[sender] = max(late_ns / 1e9, late.get(sender, 0.0))
        return late

    def waited(self, chunk: int, by: str, opened_ns: int) -> v1.Waited | None:
        """The worker that made a node wait for a chunk's latest update; None if no other worker did.

        Args:
            chunk: number of the chunk.
            by: name of the node that waited.
            opened_ns: time at which the node began to wait, in ns.
        """
        sender, last_ns = self._last.get(chunk, (by, 0))
        if sender == by or last_ns <= opened_ns:
            return None
        return v1.Waited(on=sender, until_us=(last_ns - opened_ns) // 1000)
