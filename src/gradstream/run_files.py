"""The small files of a run directory, read with care: each error names the file and says what to do.

A file may be damaged by a disk, by a crash of the machine or by hand. Readers get a `ConfigError` then, and
never a traceback of the parser.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from gradstream import events as schema
from gradstream.errors import ConfigError
from gradstream.summary import EventDict

__all__ = ["read_config", "read_events", "read_record"]

_REMEDIES = {
    "run.json": "put it back from a copy, or write {} into it: it only says where and when the run was made",
    "nodes.json": "put it back from a copy: without it the run cannot be resumed, evaluated or replayed; "
    "`gradstream report` does not need it",
    "config.toml": "put it back from a copy, or remove it: it is only shown in the report",
    "job.json": "put it back from a copy: it says which job file was recorded",
}
_EVENTS_REMEDY = "remove that line, or put the file back from a copy; what the line told is lost"

_NEEDED = {
    kind.name: [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for kind in schema.Event.__subclasses__()
}
"""By kind of event, the keys that its line must have."""


def read_record(path: Path) -> dict[str, Any]:
    """The JSON object that a file of a run directory holds.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise _damaged(path, f"got JSON of type {type(found).__name__}, expected an object")
    return found


def read_config(path: Path) -> str:
    """The text of a `config.toml`, "" where there is none. Raises ConfigError where it is not TOML."""
    try:
        text = path.read_text(encoding="utf-8")
        tomllib.loads(text)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    return text


def read_events(path: Path) -> list[EventDict]:
    """The events of a file of JSON lines, [] if there is none. A torn last line is left out.

    Raises:
        ConfigError: another line is not an event; says which.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if lines and not lines[-1].endswith(b"\n"):
        del lines[-1]  # its writer was killed in the middle, or is writing now
    return [_event(path, number, line) for number, line in enumerate(lines, 1)]


def _event(path: Path, number: int, line: bytes) -> EventDict:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _no_event(path, number, f"{type(error).__name__}: {error}") from error
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise _no_event(path, number, "expected a JSON object with a string under 'event'")
    if not isinstance(event.get("time_s"), int | float) or not isinstance(event.get("node"), str):
        raise _no_event(path, number, "expected a string under 'node' and a number under 'time_s'")
    missing = [key for key in _NEEDED.get(event["event"], ()) if key not in event]
    if missing:
        raise _no_event(path, number, f"a {event['event']!r} event needs {', '.join(missing)}")
    return event


def _no_event(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(
        f"{path}, line {number}: not an event, so the file is damaged: {why}; {_EVENTS_REMEDY}"
    )


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: {why}; {_REMEDIES.get(path.name, 'put it back from a copy')}")
