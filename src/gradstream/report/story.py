"""The story of a run, i.e. its notable events besides steps, and its status."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gradstream.report.worker_figures import alone_text, phase_text, relay_text
from gradstream.telemetry.events import EventDict

# ---- story -------------------------------------------------------------------------------

Status = Literal["finished", "failed", "stopped", "unfinished"]
"""Stopped: a user stopped it, and it can be resumed. Unfinished: it is still running, or its launcher died."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One entry of a run's story."""

    time_s: float
    kind: str  # "joined", "left", "lost", "failed", "finished", ...
    text: str


def status_of(events: Iterable[EventDict]) -> Status:
    """The status of a run by its last event of this kind: a run that failed may have been resumed."""
    status: Status = "unfinished"
    for event in events:
        match event["event"]:
            case "finished" | "failed" | "stopped":
                status = event["event"]
            case "resumed":
                status = "unfinished"
    return status


def story_of(by_kind: Mapping[str, Sequence[EventDict]]) -> tuple[Moment, ...]:
    """Who joined, left, died and came back, checkpoints, stops and the end, in the order of time.

    Args:
        by_kind: events by their name; a name without events has an empty list.
    """
    moments = [Moment(e["time_s"], "joined", e["who"]) for e in by_kind["joined"]]
    for event in by_kind["left"]:
        if event["lost"]:
            moments.append(Moment(event["time_s"], "lost", f"{event['who']}: {event['reason']}"))
        else:
            moments.append(Moment(event["time_s"], "left", event["who"]))
    for event in by_kind["exited"]:
        if event["status"] < 0:
            how = event.get("how") or f"was killed by signal {-event['status']}"
            text = f"the process of {event['who']} {how}"
            moments.append(Moment(event["time_s"], "killed", text))
    for event in by_kind["coordinator"]:
        moments.append(Moment(event["time_s"], "coordinator", "a new process goes on"))
    for event in by_kind["ledger"]:
        if event["reassigned"]:
            text = f"{event['reassigned']} minibatches of data epoch {event['epoch']} by other workers"
            moments.append(Moment(event["time_s"], "reassigned", text))
    for event in by_kind["failed"]:
        text = f"{event['culprit']}: {event['error']}: {event['message']}"
        moments.append(Moment(event["time_s"], "failed", text))
    moments += _notable(by_kind)
    for event in by_kind["finished"]:
        counted = "" if event["samples"] is None else f"{event['samples']:,} samples in the model"
        moments.append(Moment(event["time_s"], "finished", counted))
    return tuple(sorted(moments, key=lambda moment: moment.time_s))


def _notable(by_kind: Mapping[str, Sequence[EventDict]]) -> list[Moment]:
    """Machines, phases, checkpoints, stops and resumptions."""
    moments = []
    for event in by_kind["machine"]:
        why = f": {event['reason']}" if event["reason"] else ""
        text = f"{event['who']} at {event['address']} {event['state']}{why}"
        moments.append(Moment(event["time_s"], "machine", text))
    for event in by_kind["relay"]:
        if text := relay_text(event):
            moments.append(Moment(event["time_s"], "relay", text))
    partners = dict.fromkeys(event["partner"] for event in by_kind["alone"])
    for partner in partners:
        events = [event for event in by_kind["alone"] if event["partner"] == partner]
        moments.append(Moment(events[0]["time_s"], "alone", alone_text(events)))
    for event in by_kind["phase"]:
        moments.append(Moment(event["time_s"], "phase", phase_text(event)))
    for event in by_kind["insecure"][:1]:
        text = f"traffic of {event['address']} is neither encrypted nor authenticated"
        moments.append(Moment(event["time_s"], "insecure", text))
    for event in by_kind["checkpoint_failed"]:
        text = f"none of step {event['step']}, because of {event['who']}: {event['message']}"
        moments.append(Moment(event["time_s"], "no checkpoint", text))
    for event in by_kind["checkpoint"][-1:]:
        count = len(by_kind["checkpoint"])
        paused_s = math.fsum(event["paused_s"] for event in by_kind["checkpoint"])
        text = f"{event['folder']}, the last of {count}; workers were paused {paused_s:.3g} s for all of them"
        moments.append(Moment(event["time_s"], "checkpoint", text))
    for event in by_kind["note"]:
        moments.append(Moment(event["time_s"], "note", event["message"]))
    for event in by_kind["stopped"]:
        text = f"at step {event['step']}, to be resumed from {event['folder'] or 'the beginning'}"
        moments.append(Moment(event["time_s"], "stopped", text))
    for event in by_kind["resumed"]:
        moments.append(Moment(event["time_s"], "resumed", f"from {event['folder']}, step {event['step']}"))
    return moments


# ---- deaths ------------------------------------------------------------------------------
# The deaths of processes in a run and their consequences, from its events alone.


@dataclass(frozen=True, slots=True)
class Death:
    """A process that was killed by a signal.

    Args:
        who: name of the node.
        at_s: when it was killed, in seconds of the run; see `ExitedEvent`.
        noticed_s: seconds until the others went on without it; None if they never noticed or, for the coordinator,
            if no event shows it.
        back_s: seconds until a new process took part: until a worker made its first step, or a shard or the
            coordinator served again; None if that did not happen.
    """

    who: str
    at_s: float
    noticed_s: float | None
    back_s: float | None


def deaths_of(events: Iterable[EventDict]) -> list[Death]:
    """All processes on the launcher's machine that a signal has killed, in the order of time."""
    ordered = sorted(events, key=lambda event: event["time_s"])
    return [
        _death(event["who"], event["time_s"], _until_next(ordered[index + 1 :], event["who"]))
        for index, event in enumerate(ordered)
        if event["event"] == "exited" and event["status"] < 0
    ]


def _until_next(events: Iterable[EventDict], who: str) -> Iterator[EventDict]:
    """The events until another process of the same node ends."""
    for event in events:
        if event["event"] == "exited" and event["who"] == who:
            return
        yield event


def _takes_part(event: EventDict, who: str, joined: float | None) -> bool:
    """Whether an event shows that the new process of a worker or a shard does its work."""
    return event["node"] == who and (
        event["event"] == "restored" or (event["event"] == "step" and joined is not None)
    )


def _death(who: str, at_s: float, after: Iterable[EventDict]) -> Death:
    noticed = joined = back = None
    for event in after:
        kind = event["event"]
        if kind == "left" and event["who"] == who and noticed is None:
            noticed = event["time_s"]
        elif kind == "joined" and event["who"] == who:
            joined = event["time_s"]
        elif kind == who == "coordinator" or _takes_part(event, who, joined):
            back = event["time_s"]
            break
    return Death(who, at_s, *(None if time_s is None else time_s - at_s for time_s in (noticed, back)))
