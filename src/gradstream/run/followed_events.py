"""The events of a run, as its launcher follows them: read as they come, and told to whoever asks.

The coordinator writes them; the launcher adds a few of its own, and says on stderr what a person must know.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import monotonic_ns
from typing import Any

from gradstream.run.node import EVENTS
from gradstream.runtime.event_log import DISK_ERRORS, EventLog, disk_error
from gradstream.runtime.storage import DiskStorage
from gradstream.telemetry.event_lines import EventLines
from gradstream.telemetry.events import Event, encode
from gradstream.untrusted import say

__all__ = ["FollowedEvents", "OnEvent"]

OnEvent = Callable[[Mapping[str, Any]], None]

DISK_AGAIN_S = 60.0
"""After so long without a word about the disk, it is said once more that it is full."""

MESSAGE_BYTES = 1024
"""Of what a node has said, on stderr."""


class FollowedEvents:
    """Events of a run from now on; those that the file holds already are of the run's earlier parts.

    Args:
        run_dir: of the run.
        on_event: called with each event.

    Attributes:
        last: the latest event of each kind.
        carriers: by which carrier each node reaches the others.
    """

    def __init__(self, run_dir: Path, on_event: OnEvent | None) -> None:
        self._path = run_dir / EVENTS
        self._on_event = on_event
        self._read_bytes = self._path.stat().st_size if self._path.is_file() else 0
        self._torn = b""
        self._lines = EventLines()
        self._own = EventLog(
            DiskStorage(run_dir), EVENTS, node="launcher", now=monotonic_ns, tell=self.say_of_disk
        )
        self._said_ns: dict[str, int] = {}  # what was said of the disk, and when
        self.last: dict[str, Mapping[str, Any]] = {}
        self.carriers: dict[str, Mapping[str, str]] = {}

    def read(self) -> None:
        """Takes what has come since."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except OSError:
            return  # not there yet, or the disk is broken
        # What is behind the last whole line is read again: a full disk takes it back.
        *lines, self._torn = data.split(b"\n")
        self._read_bytes += len(data) - len(self._torn)
        self.take(lines)

    @property
    def skipped(self) -> str:
        """Says how many lines were no events; "" for none."""
        return self._lines.skipped

    def take(self, lines: Iterable[bytes]) -> None:
        """Takes events that are in the file, or did not get there."""
        for event in self._lines.take(b"".join(line + b"\n" for line in lines)):
            self.last[event["event"]] = event
            self._say(event)
            if event["event"] == "carriers":
                self.carriers[event["node"]] = event["by_peer"]
            if self._on_event is not None:
                self._on_event(event)

    def emit(self, event: Event) -> None:
        """Adds an event of the launcher's own."""
        self._own.append(encode(event, node="launcher", time_s=0.0))

    def mend(self) -> bool:
        """Removes a line that a coordinator that died has left half written. False where that fails."""
        if self._torn:
            self._torn = b""
            try:
                os.truncate(self._path, self._read_bytes)
            except OSError as error:
                self.say_of_disk(f"{EVENTS} does not say how the run ended: {disk_error(error)}")
                return False
        return True

    def say_of_disk(self, text: str, about: str = "") -> None:
        """Says once what several nodes notice of one disk, and besides what the final parameters wait for.

        Args:
            text: the message.
            about: what else the disk has not taken: that is said besides, and once as well.
        """
        about = text if text.startswith("the final") else about
        now_ns, said_ns = monotonic_ns(), self._said_ns.get(about)
        if said_ns is None or now_ns - said_ns > DISK_AGAIN_S * 1e9:
            say(text, MESSAGE_BYTES)
        self._said_ns[about] = now_ns

    def _say(self, event: Mapping[str, Any]) -> None:
        """Says on stderr what a person must know of an event."""
        if event["event"] == "checkpoint_failed":
            kept = f"{event['kept']} is kept" if event["kept"] else "none is kept yet"
            text = f"no checkpoint of step {event['step']:,} ({event['who']}: {event['message']}); {kept}"
            of_disk = any(f"[Errno {number}]" in text for number in DISK_ERRORS)
            self.say_of_disk(text, about="a checkpoint") if of_disk else say(text, MESSAGE_BYTES)
        elif event["event"] == "left_over":
            say(event["message"], MESSAGE_BYTES)
        elif event["event"] == "disk" and event["state"] == "waiting":
            self.say_of_disk(event["message"])
