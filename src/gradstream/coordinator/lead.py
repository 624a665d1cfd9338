"""`Lead`: the coordinator's half of a feature, and the instructions that it gives.

The coordinator is an ordered list of leads, made in `registry`. `Membership` calls their hooks one after the other, in
that order, and knows no feature by name:

    a node joins, is lost, is missing     on_join, on_lost, on_absent
    a member reports something            check, on_report, on_beat
    a worker asks for something           on_request, answer
    a member's event                      on_event
    time passes, the model has more       proceed, on_progress, timers
    members are told                      notice
    a new process goes on                 durable, restored

Nothing in a lead waits, sends or writes: the coordinator carries the instructions out.
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
    """What the coordinator is to do. Features may have further ones, which their own services carry out."""

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
"""What a node of a role is among these; other roles are those of parts."""


ONCE = frozenset({"backed_up", "broken", "quiesced", "resharded", "sound"})
"""Kinds of reports of which a beat has one at most, the newest."""

MOST_REPORTS = 1 << 16
"""The most reports of a beat: one for each gradient that was refused, or push that was lost, since the one before."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A member that was lost while the others train, or was asked to go.

    Args:
        node: the member.
        reason: what happened to it.
        worker: name of the worker that is lost with it; "" if it is a shard.
        replica: the processes of that worker that were in, by name; each with its incarnation.
    """

    node: v1.Node
    reason: str
    worker: str
    replica: Mapping[str, int]


class Lead:
    """The coordinator's half of one feature. A feature overrides the hooks that it needs."""

    REPORTS: ClassVar[Mapping[str, str]] = {}
    """The kinds of reports that it takes, each with who may send it."""

    REQUESTS: ClassVar[Mapping[str, type[Message]]] = {}
    """The methods that it serves for workers, each with the type of its requests."""

    OTHERS_WAIT: ClassVar[bool] = False
    """Whether the answers to others may wait for a request."""

    def check(self, node: v1.Node, kind: str, report: Any) -> None:
        """Raises RefusedError for an impossible report, before anything of the beat is believed."""

    def on_report(self, node: v1.Node, kind: str, report: Any, at_s: float) -> Sequence[Instruction]:
        """Takes a report that has passed `check`."""
        return ()

    def on_beat(self, node: v1.Node, beat: v1.Beat, at_s: float) -> Sequence[Instruction]:
        """Takes what is in a beat besides the reports, after those that are of this lead."""
        return ()

    def on_request(self, node: v1.Node, request: Any, at_s: float) -> Sequence[Instruction]:
        """Takes what a worker says with a request. Raises RefusedError for an impossible one."""
        return ()

    def answer(self, node: v1.Node, request: Any, at_s: float) -> Message | Refuse | None:
        """Answers the request; None if that has to wait: it is called again when something has happened."""
        raise NotImplementedError

    def on_event(self, event: Mapping[str, Any], at_s: float) -> Sequence[Instruction]:
        """Takes an event of a member, as it is in `events.jsonl`, before the beat that it came with."""
        return ()

    def on_join(self, node: v1.Node, at_s: float) -> Sequence[Instruction]:
        """A node has joined while the others train, in the place of a lost one or as a new shard."""
        return ()

    def on_lost(self, lost: Lost, at_s: float) -> Sequence[Instruction]:
        """A member is gone."""
        return ()

    def on_absent(self, rank: int) -> Sequence[Instruction]:
        """The training begins without this worker."""
        return ()

    def proceed(self, at_s: float) -> Sequence[Instruction]:
        """Goes on with what has waited for others, or for time to pass. Called after each beat while nodes train."""
        return ()

    def on_progress(self, at_s: float) -> Sequence[Instruction]:
        """More is in the model, and the run is not over with it."""
        return ()

    def on_complete(self) -> Sequence[Instruction]:
        """Every minibatch of the run is in the model. May be called again."""
        return ()

    @property
    def keeps_out(self) -> bool:
        """Whether a worker that joins late has to wait until something is over."""
        return False

    def notice(self, notice: v1.Notice) -> None:
        """Adds what all members are told of the feature."""

    def timers(self) -> Sequence[tuple[float, Callable[[float], Sequence[Instruction]]]]:
        """Seconds of training, each with what is called when they are over."""
        return ()

    def durable(self) -> dict[str, object]:
        """What a new process of the coordinator takes over, by name: see `durable.state`."""
        return {type(self).__name__: self} if hasattr(self, "KEPT") else {}

    def restored(self, at_s: float) -> Sequence[Instruction]:
        """Goes on after the state of an earlier process of the coordinator was restored."""
        return ()


def impossible(who: str, message: str) -> RefusedError:
    """The error for a message that no member can have sent in good faith."""
    return RefusedError("coordinator", "BAD_REQUEST", f"{who} sent an impossible message: {message}")
