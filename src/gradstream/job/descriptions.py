"""Writes an object as JSON, as its place and its fields, and makes it again in another process."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.code import find_function, place_of, place_of_class


def describe(value: Any) -> dict[str, Any]:
    """Describes an object as JSON, from which the `find_…` functions make it again in another process.

    Returns:
        {"class": ..., "fields": {...}, "defaults": {...}}. The class is "module:Class", or
        "file.py:Class", or "" if it is defined in the job file itself, which every node runs.
        A field that is such an object itself (a schedule) becomes {"class": ..., "fields": ...}, and a
        function {"function": place}; the place is "" if there is none (see `check_places`).
    """
    cls = type(value)
    entries = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {
        "class": f"{place}:{cls.__qualname__}" if (place := place_of_class(cls)) else "",
        "fields": {entry.name: described(getattr(value, entry.name)) for entry in entries if entry.init},
        "defaults": {
            e.name: e.default
            for e in entries
            if not isinstance(e.default, property) and e.default is not dataclasses.MISSING  # of a protocol
        },
    }


def described(value: Any) -> Any:
    """A field in the form in which JSON holds it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        described = describe(value)
        return {"class": described["class"] or place_of(type(value)), "fields": described["fields"]}
    if callable(value):
        try:
            return {"function": place_of(value)}
        except ConfigError:
            return {"function": ""}
    return value


def plain(value: Any) -> Any:
    """The value of a field in the form in which JSON holds it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Sequence):
        return list(value)
    return value


def check_places(value: Any) -> None:
    """Raises ConfigError if a field is a function that other processes cannot find."""
    for entry in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        field = getattr(value, entry.name)
        if callable(field) and not dataclasses.is_dataclass(field):
            place_of(field)
        else:
            check_places(field)


def revived(value: Any) -> Any:
    """Makes the object or function of a table that `describe` has written; returns other values unchanged."""
    if isinstance(value, Mapping) and value.keys() == {"function"}:
        return find_function(_text(value["function"]))
    if isinstance(value, Mapping) and value.keys() == {"class", "fields"}:
        if not isinstance(value["fields"], Mapping):
            raise ConfigError(f"the fields of {value['class']!r}: expected a table")
        _text(value["class"])
        fields = {name: revived(field) for name, field in value["fields"].items()}
        return made("field", value["class"], find_function(value["class"]), fields)
    return value


def made(kind: str, name: str, cls: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Calls a class or function with these options. Raises ConfigError if they do not fit."""
    check_options(kind, name, cls, options)
    try:
        return cls(**options)
    except TypeError as error:
        _check_complete(kind, name, cls, options)
        raise ConfigError(f"{kind} {name!r}: {error}") from error


def check_options(kind: str, name: str, cls: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises UnknownNameError for an option that a class does not have."""
    if not options:
        return
    fields = list(inspect.signature(cls).parameters)
    for option in options:
        if option not in fields:
            raise UnknownNameError(f"option of {kind} {name!r}", option, fields)


def _text(place: object) -> str:
    if not isinstance(place, str):
        raise ConfigError(f"a place of type {type(place).__name__}: expected 'file.py:name' or 'module:name'")
    return place


def _check_complete(kind: str, name: str, cls: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises ConfigError if an option without a default is missing."""
    missing = [
        entry.name
        for entry in inspect.signature(cls).parameters.values()
        if entry.default is entry.empty
        and entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
        and entry.name not in options
    ]
    if missing:
        arguments = ", ".join(f"{option}=..." for option in missing)
        flag = ", or --lr on the command line" if kind == "optimizer" and "lr" in missing else ""
        raise ConfigError(
            f"{kind} {name!r} lacks {', '.join(missing)}; expected an object that has it: "
            f"{cls.__name__}({arguments}){flag}"
        )
