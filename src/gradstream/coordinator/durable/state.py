"""Values of the coordinator's state as JSON, and back. Nothing read is executed.

    None, bool, int, float, str   themselves                     bytes     {"bytes": base64}
    list                          [...]                          tuple     {"tuple": [...]}
    dict, set, deque              {"dict": [[key, value], ...]}, {"set": [...]}, {"deque": [...]}
    message of the protocol       {"ModelSpec": base64}          record    {"WorkerSpeed": [field, ...]}

Only the messages and records of two short tables are read.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf.message import DecodeError, Message

from gradstream.checkpoint.draft import VectorPlace
from gradstream.checkpoint.manifest import Evaluated, JobPhase
from gradstream.coordinator.orphaned_pushes import LostPush, Orphans, Redo
from gradstream.coordinator.snapshot import Snapshot
from gradstream.data.base import BatchRef, DataProgress
from gradstream.data.leases import AssignableBatches
from gradstream.data.ledger import EpochCounts
from gradstream.data.open_ledger import LoopSequence
from gradstream.data.reassignment import Block, Epoch, LoopEpochs
from gradstream.data.shares import WorkerSpeed
from gradstream.untrusted import parse_json
from gradstream.untrusted.files import DocumentError
from gradstream.wire import v1
from gradstream.wire.chunks import Placement

# ---- values ------------------------------------------------------------------------------

MAX_BYTES = 256 << 20
"""Longest value to read: the description of a model may have some hundred thousand tensors."""

MAX_VALUES, MAX_DEPTH = 1 << 26, 64

_RECORDS: Mapping[str, type] = {
    cls.__name__: cls
    for cls in (
        AssignableBatches,
        BatchRef,
        Block,
        DataProgress,
        Epoch,
        EpochCounts,
        Evaluated,
        JobPhase,
        LoopEpochs,
        LoopSequence,
        LostPush,
        Orphans,
        Placement,
        Redo,
        Snapshot,
        VectorPlace,
        WorkerSpeed,
    )
}
_MESSAGES: Mapping[str, type[Message]] = {
    cls.DESCRIPTOR.name: cls for cls in (v1.Assigned, v1.ModelSpec, v1.Node, v1.TensorSpec)
}


RESUME = "; `gradstream resume` continues the run from its newest checkpoint, without the coordinator's stored state"
"""The remedy for a user whose run has such a value."""

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


class StateError(ValueError):
    """A stored value that is not the coordinator's; the message says why in a few words."""


def encode(value: Any) -> str:
    """The JSON text of a value. Raises TypeError for a value of another kind, which is a bug."""
    return _ENCODE(_plain(value))


def decode(text: str) -> Any:
    """The value of a JSON text. Raises StateError for any other text."""
    try:
        plain = parse_json(text, max_bytes=MAX_BYTES, max_values=MAX_VALUES, max_depth=MAX_DEPTH)
        return _value(plain)
    except (DocumentError, DecodeError, TypeError, ValueError) as error:
        raise StateError(f"{type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Message):
        return {value.DESCRIPTOR.name: base64.b64encode(value.SerializeToString(deterministic=True)).decode()}
    name = type(value).__name__
    if _RECORDS.get(name) is type(value):
        return {name: [_plain(getattr(value, field)) for field in _fields(type(value))]}
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key), _plain(entry)] for key, entry in value.items()]}
    if isinstance(value, set | frozenset):
        return {"set": sorted((_plain(entry) for entry in value), key=repr)}
    for kind in (deque, tuple):
        if isinstance(value, kind):
            return {kind.__name__: [_plain(entry) for entry in value]}
    if isinstance(value, list) or hasattr(value, "__getitem__"):  # repeated fields of messages, too
        return [_plain(entry) for entry in value]
    raise TypeError(f"{name}: the coordinator's state has no such values")


def _fields(cls: type) -> tuple[str, ...]:
    named: tuple[str, ...] | None = getattr(cls, "_fields", None)
    return named or tuple(field.name for field in dataclasses.fields(cls))


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(entry) for entry in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1:
        raise StateError(f"got an object with {len(plain)} entries, expected one")
    ((kind, inner),) = plain.items()
    if kind in _MESSAGES:
        return _MESSAGES[kind].FromString(base64.b64decode(inner, validate=True))
    if kind == "bytes":
        return base64.b64decode(inner, validate=True)
    if not isinstance(inner, list):
        raise StateError(f"{kind[:40]!r}: got a {type(inner).__name__}, expected a list")
    if kind == "dict":
        return {_value(key): _value(entry) for key, entry in inner}
    values = [_value(entry) for entry in inner]
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](values)
    if kind in _RECORDS:
        return _record(_RECORDS[kind], values)
    raise StateError(f"got a value of unknown kind {kind[:40]!r}")


def _record(cls: Any, values: list[Any]) -> Any:
    """A record from its fields, in order; some dataclasses take them by name only."""
    return cls(**dict(zip(_fields(cls), values, strict=True)))


_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "deque": deque}


# ---- state -------------------------------------------------------------------------------
# The coordinator's state as rows, one for each attribute of a state machine: what is kept, and how it is restored.
#
# A class lists in `KEPT` which of its attributes change during a run. If such an attribute is an object with its own
# `KEPT`, the object's attributes are rows of the machine. Everything else follows from the plan, which a new
# process makes again. A row is restored into the attribute's existing container, since other objects may hold it, too.


class KeptState:
    """Encodes the changing attributes of several state machines as rows, and restores them.

    Args:
        parts: the machines, by a name of one word.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = dict(parts)

    def rows(self) -> dict[str, str]:
        """The whole state: JSON by part and attribute."""
        return {key: encode(getattr(part, attribute)) for key, (part, attribute) in self._places().items()}

    def restore(self, rows: Mapping[str, str]) -> None:
        """Restores the state that `rows` returned.

        Raises:
            StateError: a row is missing, unknown, or not a value of this state.
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
    """The kept attributes of a machine, each with the object that has it."""
    for cls in reversed(type(machine).__mro__):
        for attribute in vars(cls).get("KEPT", ()):
            value = getattr(machine, attribute)
            yield from _kept(value) if hasattr(value, "KEPT") else [(machine, attribute)]


def _put(part: object, attribute: str, value: Any) -> None:
    """Sets an attribute, in place if it is a container. Raises StateError for a value of another kind."""
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
