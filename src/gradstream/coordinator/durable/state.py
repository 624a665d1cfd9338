"""The coordinator's state as rows, one for each attribute of a state machine: what is kept, and how it comes back.

A class says in `KEPT` which of its attributes change during a run. Where such an attribute is an object with a `KEPT`
of its own, the object's attributes are rows of the machine. Everything else follows from the plan, which a new process
makes again. A row is restored into the attribute's present container, since others may hold it, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from gradstream.coordinator.durable.values import RESUME, StateError, decode, encode


class KeptState:
    """Encodes the changing attributes of several state machines as rows, and restores them.

    Args:
        parts: the machines, by a name of one word.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = dict(parts)

    def add(self, name: str, part: object) -> None:
        """Adds a machine."""
        self._parts[name] = part

    def rows(self) -> dict[str, str]:
        """The whole state: JSON by part and attribute."""
        return {key: encode(getattr(part, attribute)) for key, (part, attribute) in self._places().items()}

    def restore(self, rows: Mapping[str, str]) -> None:
        """Restores the state that `rows` has given.

        Raises:
            StateError: a row is missing, unknown, or none of this state's values.
        """
        expected = self._places()
        if odd := sorted(expected.keys() ^ rows.keys()):
            raise StateError(
                f"the coordinator's stored state lacks, or has too much: {', '.join(odd)[:200]}{RESUME}"
            )
        for key, text in rows.items():
            part, attribute = expected[key]
            try:
                _put(part, attribute, decode(text))
            except StateError as error:
                raise StateError(f"the coordinator's stored state, {key}: {error}{RESUME}") from error

    def _places(self) -> dict[str, tuple[object, str]]:
        """By row, the object and its attribute."""
        return {
            f"{name}.{place[1]}": place for name, machine in self._parts.items() for place in _kept(machine)
        }


def _kept(machine: object) -> Iterator[tuple[object, str]]:
    """The attributes of a machine that are kept, each with the object that has it."""
    for cls in reversed(type(machine).__mro__):
        for attribute in vars(cls).get("KEPT", ()):
            value = getattr(machine, attribute)
            yield from _kept(value) if hasattr(value, "KEPT") else [(machine, attribute)]


def _put(part: object, attribute: str, value: Any) -> None:
    """Sets an attribute, in place where it is a container. Raises StateError for a value of another kind."""
    present = getattr(part, attribute)
    numbers = isinstance(present, int | float) and isinstance(value, int | float)
    if present is not None and value is not None and not isinstance(value, type(present)) and not numbers:
        alike = isinstance(present, dict | list | tuple) and isinstance(value, dict | list | tuple)
        if not alike or isinstance(present, dict) is not isinstance(value, dict):
            raise StateError(f"got a {type(value).__name__}, expected a {type(present).__name__}")
    if isinstance(present, dict | set):
        present.clear()
        present.update(value)
    elif isinstance(present, deque):
        present.clear()
        present.extend(value)
    elif isinstance(present, list):
        present[:] = value
    else:
        setattr(part, attribute, value)
