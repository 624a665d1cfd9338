"""Values of the coordinator's state as JSON, and back. Nothing that is read is executed.

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
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError, Message

from gradstream.checkpoint.draft import VectorPlace
from gradstream.checkpoint.manifest import Evaluated
from gradstream.coordinator.estates import Errand, Estate, LostPush
from gradstream.coordinator.participation import Interval
from gradstream.coordinator.snapshot import Snapshot
from gradstream.data.base import BatchRef
from gradstream.data.ledger import EpochCounts
from gradstream.data.open_ledger import LoopSequence
from gradstream.data.progress import DataProgress
from gradstream.data.reassignment import Block, Epoch, LoopEpochs
from gradstream.data.receipts import AssignableBatches
from gradstream.data.shares import WorkerSpeed
from gradstream.untrusted import parse_json
from gradstream.untrusted.documents import DocumentError
from gradstream.wire import v1
from gradstream.wire.placement import Placement

MAX_BYTES = 256 << 20
"""The longest value that is read: the description of a model may have some hundred thousand tensors."""

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
        Errand,
        Estate,
        Evaluated,
        Interval,
        LoopEpochs,
        LoopSequence,
        LostPush,
        Placement,
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
    """A stored value that is none of the coordinator's; the message says why in a few words."""


def encode(value: Any) -> str:
    """The JSON text of a value. Raises TypeError for a value of another kind, which is a fault of the program."""
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
        return {"dict": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if isinstance(value, set | frozenset):
        return {"set": sorted((_plain(one) for one in value), key=repr)}
    for kind in (deque, tuple):
        if isinstance(value, kind):
            return {kind.__name__: [_plain(one) for one in value]}
    if isinstance(value, list) or hasattr(value, "__getitem__"):  # repeated fields of messages, too
        return [_plain(one) for one in value]
    raise TypeError(f"{name}: the coordinator's state has no such values")


def _fields(cls: type) -> tuple[str, ...]:
    named: tuple[str, ...] | None = getattr(cls, "_fields", None)
    return named or tuple(field.name for field in dataclasses.fields(cls))


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(one) for one in plain]
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
        return {_value(key): _value(one) for key, one in inner}
    values = [_value(one) for one in inner]
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](values)
    if kind in _RECORDS:
        return _record(_RECORDS[kind], values)
    raise StateError(f"got a value of unknown kind {kind[:40]!r}")


def _record(cls: Any, values: list[Any]) -> Any:
    """A record of its fields, in order; some dataclasses take them by name only."""
    return cls(**dict(zip(_fields(cls), values, strict=True)))


_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "deque": deque}
