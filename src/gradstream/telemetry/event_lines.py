"""Parses lines of events from outside. A line that is no record of a known class with valid fields is refused.

Readers of a parsed event need not check it again: a field of seconds is a finite number, the keys of a histogram are
whole numbers, and no number is so large that a sum of such numbers overflows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

from gradstream.errors import ConfigError
from gradstream.telemetry import events
from gradstream.telemetry.events import MAX_FLOAT, Event
from gradstream.untrusted.files import DocumentError, open_regular, parse_json
from gradstream.untrusted.schema import MismatchError, check_record, check_value
from gradstream.untrusted.text import say

MAX_LINE_BYTES = 16 << 20
"""Most bytes of a line. A `round` event lists the samples of a whole round."""

PIECE_BYTES = 1 << 20
MAX_VALUES = 2_000_000
MAX_INT = 1 << 53
MAX_SECONDS = 1e9
MAX_RANK = 1 << 20
SIGNED = frozenset({"min_version", "max_version", "staleness", "status"})
"""Fields that may be below 0: a chunk without parameters has version -1, a process that was killed minus a signal."""

_NODE = re.compile(r"[!-~]{1,64}")
_COUNTED = frozenset({"staleness", "choices"})
"""Fields that are mappings with whole numbers as keys."""
_NUMBER = re.compile(r"-?[0-9]{1,15}")
_HEAD = ("event", "node", "time_s")


class EventError(ValueError):
    """A line is no event; the message says why in a few words."""


@cache
def _classes() -> Mapping[str, type[Event]]:
    records = [
        entry for entry in vars(events).values() if isinstance(entry, type) and issubclass(entry, Event)
    ]
    return {record.name: record for record in records if record.name}


def parse_event(line: bytes, *, max_bytes: int = MAX_LINE_BYTES, member: str | None = None) -> dict[str, Any]:
    """The record in a line that `events.encode` has made.

    Args:
        line: the line, without its newline.
        max_bytes: most bytes of the line.
        member: name of the worker or shard that sent the line. Its class must then be one that members report,
            the node must have this name, all fields must be known, and all characters must be printable ASCII. None
            for a line of a file, which another version may have written: unknown fields are then skipped, and
            missing ones get their default.

    Raises:
        EventError: the line is no such record. No other exception.
    """
    try:
        record = parse_json(line, max_bytes=max_bytes, max_values=MAX_VALUES, unique=False)
    except DocumentError as error:
        raise EventError(str(error)) from None
    if not isinstance(record, dict):
        raise EventError("no JSON object")
    head = {key: record.pop(key, None) for key in _HEAD}
    cls = _classes().get(head["event"]) if isinstance(head["event"], str) else None
    if cls is None:
        raise EventError("of no known class")
    if not isinstance(head["node"], str) or not _NODE.fullmatch(head["node"]):
        raise EventError(f"{cls.name} of a node without a name")
    if member is not None:
        _check_member(cls, head["node"], member, line)
    else:
        known = cls.__dataclass_fields__
        record = _defaults(cls) | {key: value for key, value in record.items() if key in known}
    try:
        check_value(head["time_s"], float, "time_s")
        check_record(cls, record)
    except MismatchError as error:
        raise EventError(f"{cls.name}: {error}") from None
    if not -MAX_SECONDS <= head["time_s"] <= MAX_SECONDS:
        raise EventError(f"{cls.name}: time_s is out of range")
    bounds = _bounds(cls.name)
    for key, value in record.items():
        within = bounds[key]
        if value is not None and within is not None and not within(value):
            raise EventError(f"{cls.name}: {key} is out of range")
    return {**head, **record}


def _defaults(cls: type[Event]) -> dict[str, Any]:
    defaults = {}
    for entry in fields(cls):
        if entry.default_factory is not MISSING:
            defaults[entry.name] = entry.default_factory()
        elif entry.default is not MISSING:
            defaults[entry.name] = entry.default
    return defaults


def _check_member(cls: type[Event], node: str, member: str, line: bytes) -> None:
    if not cls.from_members:
        raise EventError(f"{cls.name} is no event of a member")
    if node != member:
        raise EventError(f"{cls.name} in the name of another node")
    if not line.isascii() or not line.decode().isprintable():
        raise EventError(f"{cls.name} with characters that are not printable ASCII")


@cache
def _bounds(name: str) -> Mapping[str, Callable[[Any], bool] | None]:
    """By field, a function that says whether a value of the right type is in its range; None for text."""
    return {entry.name: _bound(entry.name, str(entry.type)) for entry in fields(_classes()[name])}


def _bound(name: str, annotation: str) -> Callable[[Any], bool] | None:
    if not re.search(r"\b(int|float)\b", annotation) and name not in _COUNTED:
        return None
    low, high = _range(name, "float" in annotation)

    def one(value: Any) -> bool:
        return value is None or low <= value <= high

    if annotation.startswith("Mapping"):
        if name in _COUNTED:
            is_text = "int" not in annotation
            return lambda value: all(
                _NUMBER.fullmatch(key) and (is_text or one(inner)) for key, inner in value.items()
            )
        return lambda value: all(map(one, value.values()))
    if annotation.startswith("list"):
        return lambda value: all(map(one, value))
    return one


def _range(name: str, is_float: bool) -> tuple[float, float]:
    if name.endswith("_s"):
        return -MAX_SECONDS, MAX_SECONDS
    if is_float:
        return -MAX_FLOAT, MAX_FLOAT
    most = MAX_RANK if name in ("rank", "workers", "servers") else MAX_INT
    return (-most if name in SIGNED else 0), most


class EventLines:
    """Parses a file of events, also while it grows. Lines that are no events are counted.

    Attributes:
        num_skipped: number of lines that were no events.
        torn_bytes: number of bytes of the last line, which has not ended yet.
    """

    def __init__(self) -> None:
        self.num_skipped = 0
        self.torn_bytes = 0
        self._torn = b""  # the begin of the last line, at most as much as a line may have

    def take(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The events in the next bytes of the file."""
        *lines, torn = (self._torn + data).split(b"\n")
        self.torn_bytes = len(torn) if lines else self.torn_bytes + len(data)
        self._torn = torn[: MAX_LINE_BYTES + 1]
        for line in lines:
            try:
                yield parse_event(line)
            except EventError:
                self.num_skipped += 1

    @property
    def skipped(self) -> str:
        """How many lines were skipped, in words; "" for none."""
        if self.num_skipped == 1:
            return "passed over 1 line that is no event of this version"
        return (
            f"passed over {self.num_skipped:,} lines that are no events of this version"
            if self.num_skipped
            else ""
        )


def read_events(path: Path) -> list[Mapping[str, Any]]:
    """The events in a file of JSON lines; [] if there is none. An incomplete last line is skipped.

    Lines that are no events of this version are skipped, and a message on stderr gives their number.

    Raises:
        ConfigError: it is no regular file, or cannot be read.
    """
    lines = EventLines()
    records: list[Mapping[str, Any]] = []
    try:
        with open_regular(path) as file:
            while data := file.read(PIECE_BYTES):
                records += lines.take(data)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; put it back from a copy") from error
    if lines.skipped:
        say(f"{path}: {lines.skipped}")
    return records
