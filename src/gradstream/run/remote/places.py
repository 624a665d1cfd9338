"""Places "file.py:name" in the description of a run: each machine has its own copy of the user's files, elsewhere.

The files are those that define strategies, update rules, codecs, schedules and metrics, of the job and of its phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def moved(spec: Mapping[str, Any], place: Callable[[Path], Path]) -> dict[str, Any]:
    """The description of a run, or a part of it, with other paths of the user's files.

    Args:
        spec: as JSON holds a `NodeSpec`.
        place: the new path of a file.
    """
    return {key: _moved(key, value, place) for key, value in spec.items()}


def _moved(key: str, value: Any, place: Callable[[Path], Path]) -> Any:
    if isinstance(value, Mapping):
        if key == "metrics":
            return {name: _moved("function", metric, place) for name, metric in value.items()}
        return moved(value, place)
    if isinstance(value, list | tuple):
        return [_moved("", one, place) for one in value]
    if key not in ("class", "function") or not isinstance(value, str):
        return value
    file, _, name = value.rpartition(":")
    return f"{place(Path(file))}:{name}" if file.endswith(".py") else value


def files_of(spec: Mapping[str, Any]) -> list[Path]:
    """The user's files that the description of a run names, without `job` and `script`."""
    found: dict[Path, None] = {}

    def note(file: Path) -> Path:
        found[file] = None
        return file

    moved(spec, note)
    return list(found)
