"""Follows the events of a run for its launcher: reads them as they come and passes them to a callback.

The coordinator writes them. The launcher adds a few events of its own, and prints warnings on stderr.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any

from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import GradstreamError, Interrupted
from gradstream.report.straggler import Worth
from gradstream.run.failures import typed_error
from gradstream.run.node import EVENTS
from gradstream.runtime.storage import DISK_ERRORS, DiskStorage, EventLog, disk_error
from gradstream.telemetry.event_lines import MAX_LINE_BYTES, EventLines
from gradstream.telemetry.events import Event, ExitedEvent, encode
from gradstream.untrusted import open_regular, say

# ---- followed events ---------------------------------------------------------------------

OnEvent = Callable[[Mapping[str, Any]], None]

DISK_AGAIN_S = 60.0
"""Seconds without a message about the disk after which the same message is printed again."""

PIECE_BYTES = 2 * MAX_LINE_BYTES

MESSAGE_BYTES = 1024
"""Longest part of a node's message that is printed on stderr."""

MAX_NOTES = 64
"""The most notes of users' loops that are printed."""


class FollowedEvents:
    """Reads the events that the nodes of a run write from now on, and passes each to a callback.

    The file of a resumed run also has the events from before, which are not read.

    Args:
        run_dir: run directory.
        on_event: called with each event.
        on_lost: called with the name of each node that is lost.
        on_reshard: called with each event about a change of the shards.
        from_bytes: where to begin in the file; None begins at its end.

    Attributes:
        zero_ns: see `RunClock`; None before training.
        read_bytes: how much of the file has been read or skipped.
        gone: names of the nodes that the run has lost, and that are not back.
        last: the latest event of each kind.
        carriers: for each node, the carrier by which it reaches each of the others.
    """

    def __init__(
        self,
        run_dir: Path,
        on_event: OnEvent | None,
        on_lost: Callable[[str], None] = lambda name: None,
        on_reshard: OnEvent = lambda event: None,
        *,
        from_bytes: int | None = None,
    ) -> None:
        self._path = run_dir / EVENTS
        self._on_event = on_event
        self._on_lost = on_lost
        self._on_reshard = on_reshard
        end = self._path.stat().st_size if self._path.is_file() else 0
        self.read_bytes = end if from_bytes is None else min(from_bytes, end)
        self._torn = b""
        self._lines = EventLines()
        self._own = EventLog(
            DiskStorage(run_dir), EVENTS, node="launcher", now=monotonic_ns, tell=self.say_of_disk
        )
        self._struck_ns: dict[str, int] = {}  # when a node was killed, as its killer reported
        self._said_ns: dict[str, int] = {}  # when each message about the disk was last printed
        self._noted: set[str] = set()
        self._same_data = SameData()
        self._worth = Worth()
        self.zero_ns: int | None = None
        self.gone: set[str] = set()
        self.last: dict[str, Mapping[str, Any]] = {}
        self.carriers: dict[str, Mapping[str, str]] = {}

    def read(self) -> None:
        """Reads the events that were written since the last call."""
        while self._take_piece(self._piece()):
            pass

    def _piece(self) -> bytes:
        """The next bytes of the file; none if there is no file yet, or the disk is broken."""
        try:
            with open_regular(self._path) as file:
                file.seek(self.read_bytes)
                return file.read(PIECE_BYTES)
        except OSError:
            return b""

    def _take_piece(self, data: bytes) -> bool:
        """Handles the events in the next bytes of the file. Returns whether there may be more."""
        # A torn last line is read again: the coordinator removes it when the disk is full.
        *lines, self._torn = data.split(b"\n")
        if not lines and len(data) == PIECE_BYTES:
            lines, self._torn = [data], b""  # longer than any event
        self.read_bytes += len(data) - len(self._torn)
        self.take(lines)
        return len(data) == PIECE_BYTES

    @property
    def skipped(self) -> str:
        """A text on the lines that were no events; "" if there were none."""
        return self._lines.skipped

    def take(self, lines: Iterable[bytes]) -> None:
        """Handles events from the file, or from nodes that sent them since the disk was full."""
        for event in self._lines.take(b"".join(line + b"\n" for line in lines)):
            self.last[event["event"]] = event
            self._say(event)
            if event["event"] == "carriers":
                self.carriers[event["node"]] = event["by_peer"]
            if event["event"] == "joined":
                self.gone.discard(event["who"])
            if event["event"] == "left" and event["lost"]:
                self.gone.add(event["who"])
                self._on_lost(event["who"])
            if event["event"] == "reshard":
                self._on_reshard(event)
            if self._on_event is not None:
                self._on_event(event)

    def emit(self, event: Event, at_ns: int | None = None) -> None:
        """Adds an event of the launcher, which happened at this time; None means now."""
        time_s = 0.0 if self.zero_ns is None else ((at_ns or monotonic_ns()) - self.zero_ns) / 1e9
        self._own.append(encode(event, node="launcher", time_s=time_s))

    def note_time(self, message: Mapping[str, Any]) -> None:
        """Notes when the run's clock showed 0, or when a node was killed, if a message says that."""
        self.zero_ns = message.get("zero_ns", self.zero_ns)
        if "struck" in message:
            self._struck_ns[message["struck"]] = message["at_ns"]

    def exited(self, name: str, status: int, at_ns: int | None, how: str) -> None:
        """Adds the event that a process ended before the run did, as `how` says; its parent saw that at `at_ns`."""
        if name == COORDINATOR:
            self.mend()  # removes half a line
        self.emit(ExitedEvent(who=name, status=status, how=how), self._struck_ns.pop(name, at_ns))

    def mend(self) -> bool:
        """Removes the half-written last line of a killed coordinator. Returns False if that fails."""
        if self._torn:
            self._torn = b""
            try:
                os.truncate(self._path, self.read_bytes)
            except OSError as error:
                self.say_of_disk(f"{EVENTS} does not say how the run ended: {disk_error(error)}")
                return False
        return True

    def say_of_disk(self, text: str, about: str = "") -> None:
        """Prints a message about the disk once, even if several nodes notice it.

        Args:
            text: the message.
            about: the file or event that could not be written: each gets its own message, as do the final
                parameters.
        """
        about = text if text.startswith("the final") else about
        now_ns, said_ns = monotonic_ns(), self._said_ns.get(about)
        if said_ns is None or now_ns - said_ns > DISK_AGAIN_S * 1e9:
            say(text, MESSAGE_BYTES)
        self._said_ns[about] = now_ns

    def _say(self, event: Mapping[str, Any]) -> None:
        """Prints on stderr what the user must know."""
        for text in filter(None, (self._worth.note(event), self._same_data.note(event))):
            say(text, MESSAGE_BYTES)
        if event["event"] == "checkpoint_failed":
            kept = f"{event['kept']} is kept" if event["kept"] else "none is kept yet"
            text = f"no checkpoint of step {event['step']:,} ({event['who']}: {event['message']}); {kept}"
            of_disk = any(f"[Errno {number}]" in text for number in DISK_ERRORS)
            self.say_of_disk(text, about="a checkpoint") if of_disk else say(text, MESSAGE_BYTES)
        elif event["event"] == "note":
            # Several workers may notice the same.
            if event["message"] not in self._noted and len(self._noted) < MAX_NOTES:
                self._noted.add(event["message"])
                say(event["message"], MESSAGE_BYTES)
        elif event["event"] == "left_over":
            say(event["message"], MESSAGE_BYTES)
        elif event["event"] == "disk" and event["state"] == "waiting":
            self.say_of_disk(event["message"])


# ---- same data ---------------------------------------------------------------------------

SAME_STEPS = 3
"""Steps after which equal losses are no accident."""


class SameData:
    """Notices that all loops of users' own train on the same minibatches, since nothing divides them.

    Workers begin with the same parameters. With the same minibatches they have the same losses, to the bit.
    """

    def __init__(self) -> None:
        self._workers = 0  # whose steps are compared; 0 once it is known, and in a run of a job
        self._losses: dict[int, list[float | None]] = {}  # by rank, of the first steps; None without samples

    def note(self, event: Mapping[str, Any]) -> str:
        """Takes an event of the run. Returns a message for the user; "" for none."""
        if event["event"] == "started":
            self._workers = event["workers"] if event["num_samples"] == 0 and event["workers"] > 1 else 0
        if event["event"] != "step" or not self._workers:
            return ""
        losses = self._losses.setdefault(event["rank"], [])
        if len(losses) < SAME_STEPS:
            losses.append(event["loss"] if event["samples"] else None)
        if len(self._losses) < self._workers or any(len(own) < SAME_STEPS for own in self._losses.values()):
            return ""
        workers, self._workers = self._workers, 0
        is_known = None not in losses and len(set(losses)) == SAME_STEPS  # a constant loss says nothing
        if not is_known or any(own != losses for own in self._losses.values()):
            return ""
        return (
            f"all {workers} workers had the same loss, to the last bit, in each of {SAME_STEPS} steps: they seem to "
            "train on the same minibatches. Divide the data: loader = session.shard(loader), or by session.rank"
        )


# ---- ending ------------------------------------------------------------------------------
# How a run ended, and how to continue it, in the words that its launcher and its followers share.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a run, by the latest of its events.

    Args:
        run_dir: run directory.
        last: the latest event of each kind, in this part of the run.
        first: folder of the checkpoint from which this part began; "" if the run was new.
        in_file: whether the job is in a file, so that a command can resume the run.
        begins_again: whether a resumed script would start over.
    """

    run_dir: Path
    last: Mapping[str, Mapping[str, Any]]
    first: str = ""
    in_file: bool = True
    begins_again: bool = False

    @property
    def checkpoint(self) -> str:
        """Folder of the newest known checkpoint; "" if there is none."""
        folder: str = self.last.get("checkpoint", {}).get("folder", self.first)
        return folder

    @property
    def command(self) -> str:
        """The command, or the call, that resumes the run."""
        if self.begins_again:
            return "once the script goes on where it was: by loaders of session.shard, session.skip() or session.step"
        if not self.in_file:
            return f"gradstream.resume({str(self.run_dir)!r}, job=the job)"
        return f"gradstream resume {shlex.quote(str(self.run_dir))}"

    @property
    def where(self) -> list[str]:
        """The run directory of a run that did not finish, and how to resume it."""
        more = self.checkpoint and "finished" not in self.last
        resumes = [f"it resumes from {self.checkpoint}: {self.command}"] if more else []
        return [f"run directory: {self.run_dir}", *resumes]

    @property
    def interrupted(self) -> Interrupted:
        """The stop of the run, as an exception."""
        return Interrupted(self.run_dir, self.checkpoint, self.command)

    @property
    def failure(self) -> GradstreamError | None:
        """The error that the run failed with, as its events report it; None if it did not fail."""
        failed = self.last.get("failed")
        if failed is None:
            return None
        return typed_error(failed["culprit"], failed["error"], failed["message"], failed["traceback"])
