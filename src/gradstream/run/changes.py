"""What a job asks for now that is not what its run had before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradstream.run.node_spec import NodeSpec

_NOT_ASKED = frozenset({"run_dir", "name", "chunk_elems", "cwd"})
"""Fields that say where a run is kept and was started, what it is called, and one that a checkpoint has."""


def changes(before: NodeSpec, now: NodeSpec) -> str:
    """Names each value of a run that is another one now: "epochs = 20, before 10"; "" if none is.

    Args:
        before: the description of the run as it was begun, or resumed the last time.
        now: that of the plan by which it goes on.
    """
    old, new = dict(_values(before)), dict(_values(now))
    return "; ".join(
        f"{key} = {new.get(key)}, before {old.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    )


def _values(spec: NodeSpec) -> Iterator[tuple[str, Any]]:
    for name, value in spec.plain.items():
        if name == "argv":
            yield "arguments of the job file", list(value or ())[1:]
        elif name not in _NOT_ASKED:
            yield from _flat(name, value)
    for name, described in (("strategy", spec.strategy), ("optimizer", spec.optimizer)):
        yield name, str(described.get("class", "")).rpartition(":")[2]
        yield from _flat(name, described.get("fields", {}))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    else:
        yield name, list(value) if isinstance(value, tuple) else value
