"""The base of all event records, and their encoding as JSON lines.

A record becomes one JSON line: {"event": "step", "node": "worker-0", "time_s": 12.345, ...}. `time_s` counts
seconds from the start of the run on the node's own monotonic clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

EventDict = Mapping[str, Any]
"""One record of `events.jsonl`, parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all records. Subclasses add fields of str, int, float, or flat lists and maps of them.

    Attributes:
        name: the value of "event" in its lines.
        from_members: workers and shards report it; all others come from the coordinator or the launcher.
    """

    name: ClassVar[str] = "event"
    from_members: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEvent(Event):
    """Base of the records that workers and shards report."""

    from_members: ClassVar[bool] = True


MAX_FLOAT = 1e100
"""Larger numbers are written as null: sums of them would overflow."""


def encode(event: Event, *, node: str, time_s: float) -> bytes:
    """The record as one JSON line, of ASCII alone.

    NaN, infinities and numbers beyond 1e100 become null: JSON does not hold them, or sums of them overflow.
    """
    record: dict[str, Any] = {"event": event.name, "node": node, "time_s": round(time_s, 6)}
    for entry in fields(event):
        record[entry.name] = _plain(getattr(event, entry.name))
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if -MAX_FLOAT <= value <= MAX_FLOAT else None
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) and value and isinstance(value[0], float):
        return [_plain(inner) for inner in value]
    return value
