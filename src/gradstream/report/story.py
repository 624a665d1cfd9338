"""The story of a run, i.e. its notable events besides steps, and its status."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gradstream.report.pauses import alone_text, participation_text, phase_text, relay_text
from gradstream.telemetry.events import EventDict

Status = Literal["finished", "failed", "stopped", "unfinished"]
"""Stopped: a user stopped it, and it can be resumed. Unfinished: it still runs, or its launcher died."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One entry of a run's story."""

    time_s: float
    kind: str  # "joined", "left", "lost", "failed", "finished", ...
    text: str


def status_of(events: Iterable[EventDict]) -> Status:
    """The status of a run by its last such event, since a run that failed may have been resumed."""
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
        counted = "" if event["samples"] is None else f"{event['samples']:,} samples accounted for"
        moments.append(Moment(event["time_s"], "finished", counted))
    return tuple(sorted(moments, key=lambda moment: moment.time_s))


def _notable(by_kind: Mapping[str, Sequence[EventDict]]) -> list[Moment]:
    """Machines, participation, phases, checkpoints, stops and resumptions."""
    moments = []
    for event in by_kind["machine"]:
        why = f": {event['reason']}" if event["reason"] else ""
        text = f"{event['who']} at {event['address']} {event['state']}{why}"
        moments.append(Moment(event["time_s"], "machine", text))
    for event in by_kind["participation"]:
        moments.append(Moment(event["time_s"], "participation", participation_text(event)))
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
        paused_s = math.fsum(one["paused_s"] for one in by_kind["checkpoint"])
        text = f"{event['folder']}, the last of {count}; workers were paused {paused_s:.3g} s for all of them"
        moments.append(Moment(event["time_s"], "checkpoint", text))
    for event in by_kind["stopped"]:
        text = f"at step {event['step']}, to be resumed from {event['folder'] or 'the beginning'}"
        moments.append(Moment(event["time_s"], "stopped", text))
    for event in by_kind["resumed"]:
        moments.append(Moment(event["time_s"], "resumed", f"from {event['folder']}, step {event['step']}"))
    return moments
