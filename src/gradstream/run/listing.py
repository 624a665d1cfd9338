"""Lists the runs of a folder with their most important figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from gradstream.errors import ConfigError
from gradstream.report.story import Status, status_of
from gradstream.report.summary import summary_of
from gradstream.run.files import read_record
from gradstream.run.launcher_lock import holder_of
from gradstream.run.local.door import DOOR, has_reader
from gradstream.telemetry.event_lines import read_events
from gradstream.telemetry.events import EventDict


class RunEntry(TypedDict):
    """A run in a list of runs. A figure is None if the events of the run do not contain it.

    A run that has not ended is "running" while it has a launcher, or nodes that wait for one, on this machine;
    otherwise it is "unfinished". `damaged` is "", or a message that names a damaged file of the run and the remedy.
    """

    path: Path
    status: Status | Literal["damaged", "running"]
    strategy: str | None
    accuracy: float | None
    loss: float | None
    samples_per_s: float | None
    train_s: float | None
    damaged: str


def list_runs(folder: Path) -> list[RunEntry]:
    """Every run directory in `folder`, sorted by name; default names begin with the time.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; expected a folder of runs. By default, a run is kept in runs/ of the folder "
            "in which it was started"
        )
    found = sorted(path.parent for path in folder.glob("*/run.json"))
    return [_entry(path) for path in found]


def _entry(path: Path) -> RunEntry:
    events: Sequence[EventDict] = ()
    damaged = ""
    try:
        read_record(path / "run.json")
        events = read_events(path / "events.jsonl")
    except ConfigError as error:
        damaged = str(error)
    figures: dict[str, Any] = summary_of(events)
    accuracy = [event["accuracy"] for event in events if event["event"] == "evaluated"]
    return RunEntry(
        path=path,
        status="damaged" if damaged else _status(path, events),
        strategy=figures["strategy"],
        accuracy=accuracy[-1] if accuracy else None,
        loss=figures["loss"],
        samples_per_s=figures["samples_per_s"],
        train_s=figures["train_s"],
        damaged=damaged,
    )


def _status(path: Path, events: Sequence[EventDict]) -> Status | Literal["running"]:
    status = status_of(events)
    if status != "unfinished":
        return status
    try:
        lives = holder_of(path) is not None or has_reader(path / DOOR)
    except (ConfigError, OSError):  # another user's run
        lives = False
    return "running" if lives else status
