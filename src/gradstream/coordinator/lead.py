"""`Lead`: the coordinator's half of a feature, and the instructions that it gives.

The coordinator is an ordered list of leads, made in `registry`. `Membership` calls their hooks one after the other, in
that order, and knows no feature by name:

    the training begins                   on_begin, on_absent
    a node joins, or is lost              on_join, on_lost
    a member reports something            check, on_report, on_beat
    a worker asks for something           on_request, answer
    a member's event                      on_event
    time passes, the model has more       proceed, on_progress, timers
    members are told                      notice
    a new process goes on                 durable, restored

A lead never waits, sends or writes: the coordinator carries out its instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from google.protobuf.message import Message

from gradstream.errors import RefusedError
from gradstream.telemetry.events import Event
from gradstream.wire import v1

# ---- instructions ------------------------------------------------------------------------


class Instruction:
    """An order to the coordinator. Features may define others, which their own services carry out."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Notify(Instruction):
    """Send the new notice to all members."""


@dataclass(frozen=True, slots=True)
class Refuse(Instruction):
    """Refuse the request."""

    code: v1.Code
    message: str


@dataclass(frozen=True, slots=True)
class Emit(Instruction):
    """Add the record to the events of the run."""

    event: Event


# ---- leads -------------------------------------------------------------------------------

ANY, SHARDS, WORKERS, REPLICAS = "nodes", "shards", "workers", "workers and their parts"
"""Who may send a report."""

OF_ROLE = {"shard": (ANY, SHARDS), "worker": (ANY, WORKERS, REPLICAS)}
OF_PARTS = (ANY, REPLICAS)
"""The group of senders to which a role belongs; other roles are those of parts."""


ONCE = frozenset({"backed_up", "broken", "resharded", "shared", "sound"})
"""Kinds of reports of which a beat has at most one, the newest."""

MOST_REPORTS = 1 << 16
"""Most reports of a beat: one for each gradient refused, or push lost, since the previous beat."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A member that was lost while the others train, or was asked to leave.

    Args:
        node: the member.
        reason: what happened to it.
        worker: name of the worker that is lost with it; "" if it is a shard.
        replica: the processes of that worker that were members, by name; each with its incarnation.
    """

    node: v1.Node
    reason: str
    worker: str
    replica: Mapping[str, int]


class Lead:
    """The coordinator's half of one feature. A feature overrides the hooks that it needs."""

    REPORTS: ClassVar[Mapping[str, str]] = {}
    """The kinds of reports that it takes, each with its permitted senders."""

    REQUESTS: ClassVar[Mapping[str, type[Message]]] = {}
    """The methods that it serves for workers, each with the type of its requests."""

    OTHERS_WAIT: ClassVar[bool] = False
    """Whether the answers to others may wait for a request."""

    def check(self, node: v1.Node, kind: str, report: Any) -> None:
        """Raises RefusedError for an impossible report, before anything in the beat is believed."""

    def on_report(self, node: v1.Node, kind: str, report: Any, at_s: float) -> Sequence[Instruction]:
        """Takes a report that has passed `check`."""
        return ()

    def on_beat(self, node: v1.Node, beat: v1.Beat, at_s: float) -> Sequence[Instruction]:
        """Takes the rest of a beat, after the reports for this lead."""
        return ()

    def on_request(self, node: v1.Node, request: Any, at_s: float) -> Sequence[Instruction]:
        """Takes the contents of a worker's request. Raises RefusedError for an impossible request."""
        return ()

    def answer(self, node: v1.Node, request: Any, at_s: float) -> Message | Refuse | None:
        """Answers the request; None if the answer has to wait: it is called again when something has happened."""
        raise NotImplementedError

    def on_event(self, event: Mapping[str, Any], at_s: float) -> Sequence[Instruction]:
        """Takes an event of a member, as in `events.jsonl`, before the beat that brought it."""
        return ()

    def on_join(self, node: v1.Node, at_s: float) -> Sequence[Instruction]:
        """Handles a node that has joined while the others train, replacing a lost one or as a new shard."""
        return ()

    def on_lost(self, lost: Lost, at_s: float) -> Sequence[Instruction]:
        """Handles the loss of a member."""
        return ()

    def on_begin(self, at_s: float) -> Sequence[Instruction]:
        """The training begins."""
        return ()

    def on_absent(self, rank: int) -> Sequence[Instruction]:
        """Handles that training begins without this worker."""
        return ()

    def proceed(self, at_s: float) -> Sequence[Instruction]:
        """Continues work that waited for others, or for time to pass. Called after each beat while nodes train."""
        return ()

    def on_progress(self, at_s: float) -> Sequence[Instruction]:
        """Handles that more is in the model, without the run being over."""
        return ()

    def on_complete(self) -> Sequence[Instruction]:
        """Handles that every minibatch of the run is in the model. May be called again."""
        return ()

    @property
    def keeps_out(self) -> bool:
        """Whether a worker that joins late has to wait until something is over."""
        return False

    def notice(self, notice: v1.Notice) -> None:
        """Adds the feature's part of what all members are told."""

    def timers(self) -> Sequence[tuple[float, Callable[[float], Sequence[Instruction]]]]:
        """Seconds of training, each with the function to call once they have passed."""
        return ()

    def durable(self) -> dict[str, object]:
        """The state that a new process of the coordinator takes over, by name: see `durable.state`."""
        return {type(self).__name__: self} if hasattr(self, "KEPT") else {}

    def restored(self, at_s: float) -> Sequence[Instruction]:
        """Continues after the state of an earlier process of the coordinator was restored."""
        return ()


def impossible(who: str, message: str) -> RefusedError:
    """The error for a message that no member can have sent in good faith."""
    return RefusedError("coordinator", "BAD_REQUEST", f"{who} sent an impossible message: {message}")
