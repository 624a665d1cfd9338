"""Places "file.py:name" in the description of a run: each machine has its own copy of the user's files, elsewhere.

The files are those that define strategies, update rules, codecs, schedules and metrics, of the job and of its phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def moved(spec: Any, place: Callable[[Path], Path]) -> Any:
    """The description of a run, or a part of it as JSON holds it, with other paths of the user's files.

    Args:
        spec: as `NodeSpec` describes it.
        place: the new path of a file.
    """
    if isinstance(spec, Mapping):
        return {key: _moved(key, value, place) for key, value in spec.items()}
    return [moved(one, place) for one in spec] if isinstance(spec, list | tuple) else spec


def _moved(key: str, value: Any, place: Callable[[Path], Path]) -> Any:
    if key == "metrics" and isinstance(value, Mapping):
        return {name: _moved("function", metric, place) for name, metric in value.items()}
    if key not in ("class", "function") or not isinstance(value, str):
        return moved(value, place)
    file, _, name = value.rpartition(":")
    return f"{place(Path(file))}:{name}" if file.endswith(".py") else value


def files_of(spec: Any) -> list[Path]:
    """The user's files that the description of a run names, without those of the job itself."""
    found: dict[Path, None] = {}

    def note(file: Path) -> Path:
        found[file] = None
        return file

    moved(spec, note)
    return list(found)
