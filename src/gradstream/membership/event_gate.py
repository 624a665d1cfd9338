"""What a member sends as events, held against what it may say: pure, but for the clock that it is told.

A member reports in its own name, records of known classes, and a bounded number of bytes. Everything else is
dropped and counted. So no member can fill the run directory, speak for another, or end a reader of events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gradstream.untrusted.event_lines import EventError, parse_event

__all__ = ["BEAT_BYTES", "Admitted", "EventGate", "in_beats"]

BEAT_BYTES = 1 << 20
"""Of events in one beat. A member that has more sends more beats."""

LINE_BYTES = 1 << 16
RATE_BYTES_S = 4 << 20
BURST_BYTES = 16 << 20
"""Of events of one member: so many at once, and then `RATE_BYTES_S` every second."""


class Admitted(NamedTuple):
    """What is taken of a member's events.

    Args:
        lines: to be kept, each with its newline.
        events: the same, parsed.
        num_refused: how many lines were dropped.
        why: the latest of them was.
    """

    lines: bytes
    events: list[dict[str, Any]]
    num_refused: int
    why: str


class EventGate:
    """Looks at the events of one member.

    Args:
        member: its name.
        at_s: now.
    """

    def __init__(self, member: str, at_s: float) -> None:
        self._member = member
        self._at_s = at_s
        self._left_bytes = float(BURST_BYTES)

    def take(self, data: bytes, at_s: float) -> Admitted:
        """Takes the events of one beat.

        Args:
            data: lines, as the member has sent them.
            at_s: now, on the clock of `at_s` above.
        """
        self._left_bytes = min(BURST_BYTES, self._left_bytes + (at_s - self._at_s) * RATE_BYTES_S)
        self._at_s = at_s
        if len(data) > BEAT_BYTES:
            why = f"{len(data):,} bytes of events in one beat, expected at most {BEAT_BYTES:,}"
            return Admitted(b"", [], max(1, data.count(b"\n")), why)
        if len(data) > self._left_bytes:
            why = f"more than {RATE_BYTES_S:,} bytes of events a second"
            return Admitted(b"", [], max(1, data.count(b"\n")), why)
        self._left_bytes -= len(data)
        kept: list[bytes] = []
        events: list[dict[str, Any]] = []
        refused, why = 0, ""
        lines = data.split(b"\n")
        last = lines.pop()
        for line in [*lines, last] if last else lines:
            try:
                events.append(parse_event(line, max_bytes=LINE_BYTES, member=self._member))
                kept.append(line + b"\n")
            except EventError as error:
                refused, why = refused + 1, str(error)
        return Admitted(b"".join(kept), events, refused, why)


def in_beats(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines in pieces that the gate takes as one beat each; at least one piece, which may be empty."""
    piece: list[bytes] = []
    size_bytes = 0
    for line in lines:
        if size_bytes + len(line) > BEAT_BYTES:
            yield b"".join(piece)
            piece, size_bytes = [], 0
        piece.append(line)
        size_bytes += len(line)
    yield b"".join(piece)
