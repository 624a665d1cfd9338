"""The deaths of processes in a run, and what followed, from its events alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gradstream.telemetry.events import EventDict


@dataclass(frozen=True, slots=True)
class Death:
    """A process that was killed by a signal.

    Args:
        who: name of the node.
        at_s: when it was killed, in seconds of the run; see `ExitedEvent`.
        noticed_s: so much later the others went on without it; None if they never knew it, or, of the coordinator,
            where nothing tells.
        back_s: so much later a new process took part: it had made its first step, or, of a shard or the coordinator,
            served; None if that did not happen.
    """

    who: str
    at_s: float
    noticed_s: float | None
    back_s: float | None


def deaths_of(events: Iterable[EventDict]) -> list[Death]:
    """All processes of the launcher's machine that a signal has killed, in the order of time."""
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
    """Whether an event tells that a new process of a worker or a shard does its work."""
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
    return Death(who, at_s, *(None if one is None else one - at_s for one in (noticed, back)))
