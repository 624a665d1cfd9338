"""What the state machines of membership tell the coordinator to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradstream.telemetry.events import Event
from gradstream.wire import v1

if TYPE_CHECKING:
    from gradstream.coordinator.snapshot import Snapshot

__all__ = ["Commit", "Discard", "Emit", "Instruction", "Notify", "Prepare", "Refuse"]


@dataclass(frozen=True, slots=True)
class Notify:
    """Everybody who is in gets the new notice."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Who asked is told no."""

    code: v1.Code
    message: str


@dataclass(frozen=True, slots=True)
class Emit:
    """The record goes into the run's events."""

    event: Event


@dataclass(frozen=True, slots=True)
class Prepare:
    """All workers stand still: open a draft and ask them for their own state, then `prepared`."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything is written: make it a checkpoint, then `committed`."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Discard:
    """Nothing will come of this snapshot: remove what was written of it."""

    snapshot: Snapshot


Instruction = Notify | Refuse | Emit | Prepare | Commit | Discard
