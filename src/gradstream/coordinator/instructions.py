"""Instructions of the state machines of membership to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.coordinator.snapshot import Snapshot
from gradstream.telemetry.events import Event
from gradstream.wire import v1


@dataclass(frozen=True, slots=True)
class Notify:
    """Send the new notice to all members."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the request."""

    code: v1.Code
    message: str


@dataclass(frozen=True, slots=True)
class Emit:
    """Add the record to the events of the run."""

    event: Event


@dataclass(frozen=True, slots=True)
class Prepare:
    """All workers are paused: open a draft, ask them for their own state, then call `prepared`."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything is written: make it a checkpoint, then call `committed`."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Discard:
    """The snapshot has failed: remove its files."""

    snapshot: Snapshot


Instruction = Notify | Refuse | Emit | Prepare | Commit | Discard
