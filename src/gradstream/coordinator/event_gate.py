"""What a member sends as events, held against what it may say: pure, but for the clock that it is told.

A member reports in its own name, records of known classes, and a bounded number of bytes. Everything else is
dropped and counted. So no member can fill the run directory, speak for another, or end a reader of events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gradstream.telemetry.event_lines import EventError, parse_event
from gradstream.transport.limits import LIMITS

__all__ = ["Admitted", "EventGate", "in_beats"]


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
        self._left_bytes = float(LIMITS.events_burst_bytes)

    def take(self, data: bytes, at_s: float) -> Admitted:
        """Takes the events of one beat.

        Args:
            data: lines, as the member has sent them.
            at_s: now, on the clock of `at_s` above.
        """
        earned_bytes = (at_s - self._at_s) * LIMITS.events_bytes_s
        self._left_bytes = min(LIMITS.events_burst_bytes, self._left_bytes + earned_bytes)
        self._at_s = at_s
        if len(data) > LIMITS.beat_events_bytes:
            why = f"{len(data):,} bytes of events in one beat, expected at most {LIMITS.beat_events_bytes:,}"
            return Admitted(b"", [], max(1, data.count(b"\n")), why)
        if len(data) > self._left_bytes:
            why = f"more than {LIMITS.events_bytes_s:,} bytes of events a second"
            return Admitted(b"", [], max(1, data.count(b"\n")), why)
        self._left_bytes -= len(data)
        kept: list[bytes] = []
        events: list[dict[str, Any]] = []
        refused, why = 0, ""
        lines = data.split(b"\n")
        last = lines.pop()
        for line in [*lines, last] if last else lines:
            try:
                events.append(parse_event(line, max_bytes=LIMITS.event_bytes, member=self._member))
                kept.append(line + b"\n")
            except EventError as error:
                refused, why = refused + 1, str(error)
        return Admitted(b"".join(kept), events, refused, why)


def in_beats(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines in pieces that the gate takes as one beat each; at least one piece, which may be empty."""
    piece: list[bytes] = []
    size_bytes = 0
    for line in lines:
        if size_bytes + len(line) > LIMITS.beat_events_bytes:
            yield b"".join(piece)
            piece, size_bytes = [], 0
        piece.append(line)
        size_bytes += len(line)
    yield b"".join(piece)
