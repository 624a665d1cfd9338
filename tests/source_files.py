"""The files of the package's source, for tests of how it is written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "gradstream"
FILES = sorted(path for path in SOURCE.rglob("*.py") if "_pb2" not in path.name)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def fail_with(faults: Iterable[str]) -> None:
    """Fails with all faults, one a line."""
    if found := list(faults):
        raise AssertionError("\n".join([f"{len(found)} faults:", *found]))
