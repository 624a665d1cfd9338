"""Converts settings to the types that the annotations of fields allow."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from gradstream.job.code import find_function
from gradstream.job.descriptions import revived
from gradstream.untrusted import escaped, parse_json

NONE, TRUE, FALSE = "none", ("true", "yes", "on", "1"), ("false", "no", "off", "0")


MAX_INT = 1 << 63
SHOWN_BYTES = 512


class Word(str):
    """A value as it was typed, in the environment or on the command line."""

    __slots__ = ()


class MisfitError(Exception):
    """A value of a wrong type; `expected` describes the right types in words."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


def shown(value: Any) -> str:
    """The text of a value in a message."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):  # keys or numbers that JSON does not have
        text = f"a {type(value).__name__}"
    return escaped(text, SHOWN_BYTES)


def fit(value: Any, hint: Any) -> Any:
    """Converts a value to the type `hint`: parses a `Word`, and checks anything else.

    A setting may be a number, true or false, text, a path, a list, a table or a record of these, or a
    function by its place, "file.py:function". Of a union, the first type that fits is taken, text last.

    Raises:
        MisfitError: the value fits no type of the union, or a setting cannot have these types.
        ConfigError: there is no function at a place.
    """
    if isinstance(value, Mapping):  # an object, in the form of config.toml
        value = revived(value)
        if not isinstance(value, Mapping):
            return value
    members = [m for m in _members(hint) if _taker(m) is not None]
    expected = []
    for member in sorted(members, key=lambda m: m is str):
        taker = _taker(member)
        assert taker is not None
        try:
            return taker(value, member)
        except MisfitError as error:
            expected.append(error.expected)
    raise MisfitError(" or ".join(expected) or "an object, which only a job file can give")


@functools.cache
def fields_of(made_by: Callable[..., Any]) -> Mapping[str, Any]:
    """Annotations of the arguments of a class or function, by name; Any without an annotation."""
    import inspect

    try:
        hints = typing.get_type_hints(made_by if inspect.isfunction(made_by) else made_by.__init__)
    except Exception:  # the user's annotations, which only a type checker can resolve
        hints = {}
    try:
        names = list(inspect.signature(made_by).parameters)
    except ValueError:  # a built-in class such as `dict` has no fields
        names = []
    return {name: hints.get(name, Any) for name in names}


def record_in(hint: Any) -> type | None:
    """The dataclass among the members of `hint`; None if there is none, or more than one."""
    records = [m for m in _members(hint) if isinstance(m, type) and dataclasses.is_dataclass(m)]
    return records[0] if len(records) == 1 else None


# ---- one taker for each kind of type ------------------------------------------------------

Taker = Callable[[Any, Any], Any]


def _taker(member: Any) -> Taker | None:
    """The function that reads and checks values of a type; None for types that cannot be written."""
    base = typing.get_origin(member) or member
    if base in _TAKERS:
        return _TAKERS[base]
    if isinstance(base, type):
        if dataclasses.is_dataclass(base):
            return _record
        if issubclass(base, list | tuple) or base is Sequence:
            return _list
        if issubclass(base, dict) or base is Mapping:
            return _table
    return None


def _members(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _none(value: Any, _: Any) -> None:
    if value is not None and not (isinstance(value, Word) and value.lower() == NONE):
        raise MisfitError(NONE)


def _bool(value: Any, _: Any) -> bool:
    if isinstance(value, Word) and value.lower() in TRUE + FALSE:
        return value.lower() in TRUE
    if not isinstance(value, bool):
        raise MisfitError("true or false")
    return value


def _int(value: Any, _: Any) -> int:
    if isinstance(value, Word):
        try:
            value = int(value)
        except ValueError:
            pass
    if not isinstance(value, int) or isinstance(value, bool) or not -MAX_INT < value < MAX_INT:
        raise MisfitError("a whole number")
    return value


def _float(value: Any, _: Any) -> float:
    if isinstance(value, Word):
        try:
            return float(value)
        except ValueError:
            pass
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise MisfitError("a number")
    try:
        return float(value)
    except OverflowError:
        raise MisfitError("a number") from None


def _text(value: Any, _: Any) -> str:
    if not isinstance(value, str):
        raise MisfitError("text")
    return str(value)


def _path(value: Any, _: Any) -> Path:
    if not isinstance(value, str | Path):
        raise MisfitError("a path")
    return Path(value)


def _function(value: Any, _: Any) -> Any:
    if not isinstance(value, str) or ":" not in value:
        raise MisfitError('a function as "file.py:function"')
    return find_function(str(value))


def _choice(value: Any, member: Any) -> Any:
    for choice in typing.get_args(member):
        if value == choice or (isinstance(value, Word) and value == str(choice)):
            return choice
    raise MisfitError("one of " + ", ".join(map(shown, typing.get_args(member))))


def _anything(value: Any, _: Any) -> Any:
    return _read(value, str(value)) if isinstance(value, Word) else value


def _list(value: Any, member: Any) -> Any:
    if isinstance(value, Word):
        value = _read(value, [Word(part.strip()) for part in value.split(",")])
    inner = next(iter(typing.get_args(member)), Any)
    if not isinstance(value, list | tuple):
        raise MisfitError("a list")
    try:
        fitted = [fit(entry, inner) for entry in value]
    except MisfitError as error:
        raise MisfitError(f"a list (each entry {error.expected})") from None
    return tuple(fitted) if typing.get_origin(member) is tuple else fitted


def _table(value: Any, member: Any) -> dict[Any, Any]:
    if isinstance(value, Word):
        value = _read(value, None)
    _, inner = typing.get_args(member) or (Any, Any)
    if not isinstance(value, Mapping):
        raise MisfitError("a table {key = value}")
    return {key: fit(entry, inner) for key, entry in value.items()}


def _record(value: Any, member: Any) -> Any:
    hints = fields_of(member)
    if isinstance(value, Word):
        value = _read(value, None)
    if not isinstance(value, Mapping):
        raise MisfitError(f"a table with keys of {', '.join(hints)}")
    if unknown := sorted(map(str, set(value) - set(hints))):
        raise MisfitError(f"a table without {', '.join(unknown)}, with keys of {', '.join(hints)}")
    fitted = {key: fit(entry, hints[key]) for key, entry in value.items()}
    try:
        return member(**fitted)
    except TypeError as error:  # a field without a default is missing
        raise MisfitError(f"a table with keys of {', '.join(hints)}: {error}") from None


def _read(word: Word, otherwise: Any) -> Any:
    """The value of a word that is JSON; else `otherwise`."""
    try:
        return parse_json(word)
    except ValueError:
        return otherwise


_TAKERS: dict[Any, Taker] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    str: _text,
    Path: _path,
    Literal: _choice,
    Callable: _function,
    Any: _anything,
}
