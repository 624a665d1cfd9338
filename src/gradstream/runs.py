"""`attach()`, `stop()` and `reshard()`: follow, stop and change a run that another process launched."""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradstream.errors import ConfigError, DeadlineError, PeerLostError
from gradstream.report.progress_line import shown
from gradstream.run.followed_events import Ending, FollowedEvents, OnEvent
from gradstream.run.launcher_lock import LauncherRecord, holder_of, signal_launcher
from gradstream.run.node import EVENTS
from gradstream.run.reshards import ask
from gradstream.run.result import Run, described

__all__ = ["attach", "reshard", "stop"]

POLL_S = 0.2
"""Seconds between two checks of the events and the launcher."""

STOP_S = 120.0

RESHARD_S = 300.0
"""The preparation and the handover have deadlines of their own, which are shorter."""

NOW_S = 0.5
"""Seconds between two signals that end a run at once: the launcher takes two in quick succession for one."""


def attach(path: str | Path, *, on_event: OnEvent | None = None, progress: bool | None = None) -> Run:
    """Follows a run to its end, whether or not its launcher is detached. Nothing that happens here ends the run.

    Args:
        path: the run directory.
        on_event: called with each event of this part of the run, including those so far.
        progress: as for `train`.

    Returns:
        The run, as `Run.load` reads it; `evaluate` needs `model` and `data`.

    Raises:
        ConfigError: this is no run directory, or it belongs to another user or another machine.
        PeerLostError: no process of the run is left, and it has not finished.
        Interrupted: the run was stopped.
        GradstreamError: the run failed, as in `train`.
        KeyboardInterrupt: Ctrl-C; the run goes on.
    """
    with shown(on_event, progress) as each:
        follower = _Follower(Path(path), each)
        try:
            follower.to_end()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{follower.path} goes on without this terminal; {follower.commands}"
            ) from None
        return follower.result()


def stop(path: str | Path, *, now: bool = False, wait_s: float = STOP_S) -> str:
    """Ends a run as Ctrl-C in its terminal does: with a checkpoint, if the job makes any.

    Args:
        path: the run directory.
        now: whether to end at once, as a second Ctrl-C does: the run can be resumed from its newest checkpoint.
        wait_s: longest wait for the end of the run, in seconds.

    Returns:
        What was done, as a sentence.

    Raises:
        ConfigError: as in `attach`; or the launcher is on another machine.
        DeadlineError: the run has not ended within `wait_s`; it is still stopping.
        PeerLostError: as in `attach`.
    """
    follower = _Follower(Path(path), None)
    if follower.has_ended:
        return f"{follower.path} had ended before: {follower.how}"
    give_up_s = time.monotonic() + wait_s
    signalled_s: dict[int, float] = {}

    def tell(pid: int) -> None:
        at_s = time.monotonic()
        if pid not in signalled_s or (now and at_s > signalled_s[pid] + NOW_S):
            signalled_s[pid] = at_s
            signal_launcher(follower.path, signal.SIGTERM)
        if at_s > give_up_s:
            hint = "" if now else f"; at once: gradstream stop --now {shlex.quote(str(follower.path))}"
            raise DeadlineError(
                "launcher",
                f"process {pid} was told to end {follower.path}, and has not within {wait_s:g} s: workers finish a "
                f"minibatch and a checkpoint is written first{hint}",
            )

    follower.to_end(tell)
    if not now or follower.how != UNFINISHED:
        return f"{follower.path}: {follower.how}"
    from_it = follower.ending.checkpoint
    return f"{follower.path} was ended at once; " + (
        f"it resumes from {from_it}: {follower.ending.command}" if from_it else "no checkpoint was made yet"
    )


def reshard(path: str | Path, *, servers: int, wait_s: float = RESHARD_S) -> str:
    """Changes the number of shards of a running job; returns when the new shards hold the parameters.

    Workers train until each new shard is ready, and wait while the parameters are handed over.

    Args:
        path: the run directory.
        servers: new number of shards.
        wait_s: longest wait, in seconds.

    Returns:
        What was done, as a sentence.

    Raises:
        ConfigError: the run cannot do this, or not now; its shards stay.
        PeerLostError: a node was lost, was late, or failed; the old shards still hold the parameters. Also as in
            `attach`.
        DeadlineError: nothing was decided within `wait_s`; the run goes on, and its events will tell.
    """
    token, outcome = "", dict[str, Any]()

    def on_event(event: Mapping[str, Any]) -> None:
        if (
            event["event"] == "reshard"
            and event["token"] == token
            and event["state"] in ("switched", "failed")
        ):
            outcome.update(event)

    follower = _Follower(Path(path), on_event)
    if follower.has_ended:
        remedy = (
            "no shard is left to change" if follower.has_finished else f"resume it with servers={servers}"
        )
        raise ConfigError(f"{follower.path} has ended: {follower.how}; {remedy}")
    token, give_up_s = ask(follower.path, servers), time.monotonic() + wait_s

    def decided(_: int) -> bool:
        if not outcome and time.monotonic() > give_up_s:
            raise DeadlineError(
                "coordinator",
                f"the shards of {follower.path} were not changed within {wait_s:g} s, and may still be: "
                f"`gradstream attach {shlex.quote(str(follower.path))}` shows when",
            )
        return bool(outcome)

    follower.to_end(decided)
    if not outcome:
        raise PeerLostError("coordinator", f"{follower.path} has ended before: {follower.how}")
    if outcome["state"] == "switched":
        names = ", ".join(outcome["shards"])
        return (
            f"{follower.path}: {names} hold the parameters; nothing was updated for {outcome['held_s']:.2f} s"
        )
    if not outcome["who"]:
        raise ConfigError(outcome["message"])
    raise PeerLostError(
        outcome["who"], f"{outcome['message']}; the shards before still hold the parameters: ask again"
    )


UNFINISHED = "no process of it is left, and it has not finished"


class _Follower:
    """Follows a run by its events and by the lock of its launcher.

    Args:
        path: the run directory.
        on_event: see `attach`.

    Raises:
        ConfigError: see `attach`.
    """

    def __init__(self, path: Path, on_event: OnEvent | None) -> None:
        self.path = path.resolve()
        try:
            owner = self.path.stat().st_uid
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}; expected the directory of a run") from None
        if owner != os.geteuid() != 0:
            raise ConfigError(
                f"{self.path} is a run of {_user(owner)}, and this is {_user(os.geteuid())}: only its user can attach "
                "to it or stop it; `gradstream report` shows what you may read"
            )
        self._spec = described(self.path)
        self._record = LauncherRecord.read(self.path)
        start = 0 if self._record is None else self._record.events_from
        self._events = FollowedEvents(self.path, on_event, from_bytes=start)

    @property
    def has_ended(self) -> bool:
        """Whether the run has no launcher any more, and so no process. All its events have been read then."""
        ended = holder_of(self.path) is None
        self._events.read()
        return ended

    def to_end(self, each: Callable[[int], bool | None] = lambda pid: None) -> None:
        """Returns when no process of the run is left, or when `each` returns true.

        Args:
            each: called repeatedly with the id of the launcher, when new events have been read.
        """
        while not self.has_ended:
            pid = holder_of(self.path)
            if pid is not None and each(pid):
                return
            time.sleep(POLL_S)

    @property
    def ending(self) -> Ending:
        """How the run has ended."""
        spec = self._spec
        first = "" if spec.resume is None else str(spec.resume.get("folder", ""))
        in_file = bool(spec.job or spec.script)
        return Ending(run_dir=self.path, last=self._events.last, first=first, in_file=in_file)

    @property
    def has_finished(self) -> bool:
        """Whether the run has done all of its work."""
        return "finished" in self._events.last

    @property
    def how(self) -> str:
        """How the run has ended, in words."""
        if "stopped" in self._events.last:
            return str(self.ending.interrupted)
        if (failure := self.ending.failure) is not None:
            return f"it failed: {failure}"
        return "it has finished" if self.has_finished else UNFINISHED

    @property
    def commands(self) -> str:
        """How to follow the run again, and how to end it."""
        path = shlex.quote(str(self.path))
        return f"gradstream attach {path} shows it again, gradstream stop {path} ends it"

    def result(self) -> Run:
        """The ended run; raises the error that it ended with, as `attach`."""
        if "stopped" in self._events.last:
            raise self.ending.interrupted
        if (failure := self.ending.failure) is not None:
            for note in self.ending.where:
                failure.add_note(note)
            raise failure
        if self.has_finished:
            return Run.load(self.path)
        host = socket.gethostname()
        if self._record is not None and self._record.host != host:
            raise ConfigError(
                f"{self.path} was launched on {self._record.host}, and this is {host}: attach there; if that machine "
                f"is gone, {self.ending.command}"
            )
        lost = PeerLostError("launcher", f"{self.path}: {UNFINISHED}")
        if self._events.skipped or not (self.path / EVENTS).is_file():
            what = self._events.skipped or "no file that can be read"
            lost.add_note(
                f"by {self.path / EVENTS}, which is damaged ({what}): the run may have finished all the same"
            )
        lost.add_note(f"it goes on from its newest checkpoint, if it has one: {self.ending.command}")
        raise lost


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
