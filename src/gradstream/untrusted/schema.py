"""Checks that the values of a document have the types of a dataclass's fields."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union

MAX_INT = 1 << 64
"""Documents of gradstream hold no larger numbers."""

Check = Callable[[Any], str | None]
"""Returns the expected type if a value does not fit; None if it does."""


class MismatchError(ValueError):
    """A value of the wrong type for its place."""


def check_record(cls: type, record: Any, where: str = "") -> None:
    """Checks that a mapping has the fields of a dataclass, with their types, and no others.

    Args:
        cls: the dataclass. Annotations may be str, int, float, bool, None, Any, Literal, unions, lists,
            tuples, mappings with text as keys, and dataclasses; floats must be finite.
        record: value of a document.
        where: beginning of the message.

    Raises:
        MismatchError: names the field and the expected type. No other exception.
    """
    wrong = _record(cls)(record)
    if wrong is not None:
        raise MismatchError(f"{where}{wrong}")


def check_value(value: Any, hint: Any, where: str) -> None:
    """Checks that one value has the type `hint`. Raises MismatchError, which begins with `where`."""
    wrong = _check_of(hint)(value)
    if wrong is not None:
        raise MismatchError(f"{where}: {wrong}")


@cache
def _record(cls: type) -> Check:
    hints = typing.get_type_hints(cls)
    entries = [entry for entry in dataclasses.fields(cls) if entry.init]
    checks = {entry.name: _check_of(hints[entry.name]) for entry in entries}
    missing = dataclasses.MISSING
    needed = [e.name for e in entries if e.default is missing and e.default_factory is missing]

    def check(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f"{_shown(value)}, expected an object with {', '.join(checks)}"
        for name in needed:
            if name not in value:
                return f"{name} is missing"
        for name, inner in value.items():
            own = checks.get(name)
            if own is None:
                return f"{_shown(name)} is no field; expected {', '.join(checks)}"
            wrong = own(inner)
            if wrong is not None:
                return f"{name}: {wrong}"
        return None

    return check


@cache
def _check_of(hint: Any) -> Check:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: None
    if origin in (Union, types.UnionType):
        return _any_of([_check_of(hint) for hint in inner])
    if origin is Literal:
        return lambda value: None if value in inner else f"{_shown(value)}, expected one of {inner}"
    if origin is tuple and inner[-1:] != (Ellipsis,):
        return _tuple([_check_of(hint) for hint in inner])
    base = origin or hint
    if base in _PLAIN:
        return _PLAIN[base]
    if isinstance(base, type) and issubclass(base, Mapping):
        return _mapping(_check_of(inner[1] if inner else Any))
    if isinstance(base, type) and issubclass(base, Sequence):
        return _sequence(_check_of(inner[0] if inner else Any))
    if dataclasses.is_dataclass(base) and isinstance(base, type):
        return _record(base)
    raise TypeError(f"{hint!r}: no document holds such values")


def _any_of(checks: list[Check]) -> Check:
    def check(value: Any) -> str | None:
        wrongs = []
        for check in checks:
            wrong = check(value)
            if wrong is None:
                return None
            wrongs.append(wrong)
        return wrongs[0]

    return check


def _mapping(inner: Check) -> Check:
    def check(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f"{_shown(value)}, expected an object"
        for key, entry in value.items():
            if not isinstance(key, str):
                return f"{_shown(key)}, expected text as a key"
            wrong = inner(entry)
            if wrong is not None:
                return f"{_shown(key)}: {wrong}"
        return None

    return check


def _sequence(inner: Check) -> Check:
    def check(value: Any) -> str | None:
        if not isinstance(value, list | tuple):
            return f"{_shown(value)}, expected a list"
        for index, entry in enumerate(value):
            wrong = inner(entry)
            if wrong is not None:
                return f"[{index}]: {wrong}"
        return None

    return check


def _tuple(checks: list[Check]) -> Check:
    def check(value: Any) -> str | None:
        if not isinstance(value, list | tuple) or len(value) != len(checks):
            return f"{_shown(value)}, expected a list of {len(checks)}"
        wrongs = (check(entry) for check, entry in zip(checks, value, strict=True))
        return next((wrong for wrong in wrongs if wrong is not None), None)

    return check


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else f"{_shown(value)}, expected text"


def _bool(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"{_shown(value)}, expected true or false"


def _int(value: Any) -> str | None:
    fits = isinstance(value, int) and not isinstance(value, bool) and -MAX_INT < value < MAX_INT
    return None if fits else f"{_shown(value)}, expected a whole number"


def _float(value: Any) -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value}, expected a finite number"
    return None if _int(value) is None else f"{_shown(value)}, expected a number"


def _none(value: Any) -> str | None:
    return None if value is None else f"{_shown(value)}, expected null"


def _shown(value: Any) -> str:
    """A value as text for a message; only its type if the value may be long."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, str):
        return ascii(value[:40])
    if isinstance(value, int):
        return str(value) if abs(value) < MAX_INT else "a number of more than 64 bits"
    return f"a {type(value).__name__}"


_PLAIN: dict[Any, Check] = {
    str: _text,
    bool: _bool,
    int: _int,
    float: _float,
    type(None): _none,
    None: _none,
}
