"""`EventGate`: checks the events that a member sends. Pure, but for the time that callers pass.

A member reports only in its own name, only records of known classes, and a bounded number of bytes. The gate
drops and counts everything else. So no member can fill the run directory, speak for another, or break a
reader of events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gradstream.telemetry.event_lines import EventError, parse_event
from gradstream.transport.limits import LIMITS


class Admitted(NamedTuple):
    """The admitted events of a beat.

    Args:
        lines: the events as JSON lines.
        events: the same events, parsed.
        num_refused: number of lines that were dropped.
        why: why the latest of them was dropped.
    """

    lines: bytes
    events: list[dict[str, Any]]
    num_refused: int
    why: str


class EventGate:
    """Checks the events of one member.

    Args:
        member: name of the member.
        at_s: present time in seconds.
    """

    def __init__(self, member: str, at_s: float) -> None:
        self._member = member
        self._at_s = at_s
        self._left_bytes = float(LIMITS.events_burst_bytes)

    def take(self, data: bytes, at_s: float) -> Admitted:
        """Checks the events of one beat.

        Args:
            data: JSON lines from the member.
            at_s: present time in seconds.
        """
        earned_bytes = (at_s - self._at_s) * LIMITS.events_bytes_s
        self._left_bytes = min(LIMITS.events_burst_bytes, self._left_bytes + earned_bytes)
        self._at_s = at_s
        num_refused, why = 0, ""
        if len(data) > LIMITS.beat_events_bytes:
            why = f"{len(data):,} bytes of events in one beat, expected at most {LIMITS.beat_events_bytes:,}"
        elif len(data) > self._left_bytes:
            why = f"more than {LIMITS.events_bytes_s:,} bytes of events a second"
        if why:
            return Admitted(b"", [], max(1, data.count(b"\n")), why)
        self._left_bytes -= len(data)
        admitted: list[bytes] = []
        events: list[dict[str, Any]] = []
        lines = data.split(b"\n")
        last = lines.pop()
        for line in [*lines, last] if last else lines:
            try:
                events.append(parse_event(line, max_bytes=LIMITS.event_bytes, member=self._member))
                admitted.append(line + b"\n")
            except EventError as error:
                num_refused, why = num_refused + 1, str(error)
        return Admitted(b"".join(admitted), events, num_refused, why)


def in_beats(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Divides lines into pieces that the gate accepts in one beat each; at least one, which may be empty."""
    piece: list[bytes] = []
    size_bytes = 0
    for line in lines:
        if size_bytes + len(line) > LIMITS.beat_events_bytes:
            yield b"".join(piece)
            piece, size_bytes = [], 0
        piece.append(line)
        size_bytes += len(line)
    yield b"".join(piece)
