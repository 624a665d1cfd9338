"""Turns a failure that a node has reported back into an exception.

A node reports the class name, the message and the traceback of its exception as texts. The launcher, or a
simulation, raises the exception that this module makes from them.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from gradstream import errors
from gradstream.coordinator.client.presence import EvictedError
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    DiskError,
    GradientError,
    GradstreamError,
    InternalError,
    NonFiniteError,
    PeerLostError,
    RefusedError,
    ReplicasDifferError,
    UserCodeError,
)
from gradstream.job.code import run_kept
from gradstream.run.result import Run, reopen
from gradstream.runtime.storage import disk_error, disk_remedy
from gradstream.telemetry.events import EvaluatedEvent, FailedEvent, encode
from gradstream.untrusted import escaped, say
from gradstream.worker.evaluation import Evaluation

# ---- failures ----------------------------------------------------------------------------

NAME_BYTES, MESSAGE_BYTES, TRACEBACK_BYTES = 128, 8192, 1 << 16

TAIL_LINES, TAIL_BYTES = 5, 1024
"""The part of a node's log that an error shows."""

_MOST_LIKELY = {
    "BAD_FINGERPRINT": (
        "nodes have built different models. Most likely the model depends on something that differs between them: an "
        "environment variable, a random shape, a file that is not the same on each machine, or a job file that was "
        "edited while the run started"
    ),
    "BAD_REQUEST": (
        "a node was sent something that it cannot use. Most likely its versions of gradstream, torch or the job differ "
        "from the others' (`gradstream doctor` prints them), or a program of another run answers at its address; if "
        "neither is so, it is a bug of gradstream: please report it, with the folder logs of the run directory"
    ),
}
"""What the code of a refusal means to a user."""

_OF_USER = {
    cls.__name__: cls
    for cls in (UserCodeError, GradientError, NonFiniteError, DataError, ReplicasDifferError)
}
_OF_PEER = {cls.__name__: cls for cls in (PeerLostError, DeadlineError)}


def typed_error(culprit: str, error: str, message: str, traceback_text: str) -> GradstreamError:
    """The exception that a node reported by name, with its texts escaped except for newlines."""
    culprit, error = escaped(culprit, NAME_BYTES), escaped(error, NAME_BYTES)
    message = escaped(message, MESSAGE_BYTES, newlines=True)
    traceback_text = escaped(traceback_text, TRACEBACK_BYTES, newlines=True)
    if error in _OF_USER:
        return _OF_USER[error](message if culprit in message else f"{culprit}: {message}", traceback_text)
    if error in _OF_PEER:
        return _OF_PEER[error](*_peer_of(culprit, message))
    if error == "RefusedError" and (match := re.match(r"(\S+) refused \((\w+)\): (.*)", message, re.DOTALL)):
        refused = RefusedError(match[1], match[2], match[3])
        if refused.code in _MOST_LIKELY:
            refused.add_note(f"{refused.code}: {_MOST_LIKELY[refused.code]}")
        return refused
    kind = getattr(errors, error, None)
    for base in (InternalError, ConfigError, DiskError, GradstreamError):
        if isinstance(kind, type) and issubclass(kind, base):
            made = (kind if base is InternalError else base)(f"{culprit}: {message}")
            if base is InternalError and traceback_text:
                made.add_note(traceback_text)
            return made
    # The user's code raised outside of the functions that we wrap, or this is our bug.
    return UserCodeError(f"{culprit}: {error}: {message}", traceback_text)


def failed_event(error: GradstreamError, culprit: str) -> FailedEvent:
    """The event of a run that failed with an error; `culprit` is at fault unless the error names another node."""
    return FailedEvent(
        culprit=getattr(error, "peer", culprit),
        error=type(error).__name__,
        message=str(error),
        traceback=getattr(error, "traceback_text", ""),
    )


def _peer_of(culprit: str, message: str) -> tuple[str, str]:
    """Splits a message into the node that it begins with, or else `culprit`, and the rest."""
    match = re.match(r"(coordinator|(?:shard|worker|part\d+)-\d+): (.*)", message, re.DOTALL)
    return (match[1], match[2]) if match else (culprit, message)


def how_ended(status: int, cause: str = "") -> str:
    """How a process ended, in words.

    Args:
        status: its exit status; minus the number of the signal that killed it.
        cause: who or what killed it; "" if unknown.
    """
    if status >= 0:
        return f"ended with status {status}"
    if cause or -status == signal.SIGKILL:
        return f"was killed by signal {-status} ({cause or 'kill -9, or Linux where memory runs out: see dmesg'})"
    try:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-status}"


_ENDED_EARLY = (
    " (a loop of your own joins the run when it calls session.wrap, session.split or session.exchange)"
)


class EndedNodes:
    """The nodes of a run that have ended, and the errors that they reported.

    Attributes:
        statuses: exit status of each node that has ended; minus the number of the signal that killed it.
    """

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {}
        self._causes: dict[str, str] = {}  # why Linux killed a process, if known
        self._errors: dict[str, Mapping[str, Any]] = {}

    @property
    def first(self) -> str:
        """The node that ended first."""
        return next(iter(self.statuses))

    def note(self, name: str, status: int, cause: str) -> None:
        """Notes that the process of a node has ended, and why Linux killed it, if known."""
        self.statuses[name] = status
        self._causes[name] = cause

    def report(self, name: str, error: Mapping[str, Any]) -> None:
        """Notes the error, message and traceback that a node has sent."""
        self._errors[name] = error

    def lose(self, name: str, error: Mapping[str, Any]) -> None:
        """Notes that a node was lost with its machine, unless it ended or failed before."""
        self._errors.setdefault(name, error)
        self.statuses.setdefault(name, 1)

    def was_lost(self, name: str) -> bool:
        """Whether a node was killed by a signal, given up by the others, or cut off by the coordinator's death."""
        said = self._errors.get(name)
        if said is None:
            return self.statuses[name] < 0
        error, message = str(said["error"]), str(said["message"])
        return error == EvictedError.__name__ or (
            error == PeerLostError.__name__
            and (
                message.startswith(COORDINATOR) or self.statuses[name] < 0
            )  # killed on a machine that has joined
        )

    def forget(self, name: str) -> None:
        """Forgets how a node ended, since it is started again."""
        self.statuses.pop(name, None)
        self._causes.pop(name, None)
        self._errors.pop(name, None)

    def excuse(self, name: str) -> None:
        """Forgets the error of a node without which the run goes on."""
        self._errors.pop(name, None)

    def failed_with(self, *kinds: type[Exception]) -> str | None:
        """The first node that reported one of these errors, or one derived from them; None for none."""
        for name, said in self._errors.items():
            kind = getattr(errors, said["error"], None)
            if isinstance(kind, type) and issubclass(kind, kinds):
                return name
        return None

    def how(self, name: str) -> str:
        """How the process of a node ended, in words."""
        return how_ended(self.statuses[name], self._causes.get(name, ""))

    def error_of(self, name: str, log_tail: Callable[[str, int], str]) -> GradstreamError:
        """Why a node ended: the error that it reported, or else its exit status and the end of its log."""
        said = self._errors.get(name)
        if said is not None:
            return typed_error(name, said["error"], said["message"], said["traceback"])
        shown = escaped(log_tail(name, TAIL_LINES), TAIL_BYTES, newlines=True)
        hint = "" if self.statuses[name] else _ENDED_EARLY
        return PeerLostError(name, f"its process {self.how(name)}{hint}; the end of its log:\n{shown}")


# ---- final evaluation --------------------------------------------------------------------
# The evaluation of a run that has ended, and its place in the events of the run.


def evaluate(run: Run) -> Evaluation | None:
    """The run's evaluation on held-out samples; None if there are none, or no parameters."""
    if run.model is None or run.data is None or not run.data.num_test_samples or not run.parameters:
        return None
    with ExitStack() as stack:
        if run.path is not None:
            stack.callback(run_kept(run.path))  # evaluation may import more of the user's code
        evaluation = run.evaluate()
    keep_evaluation(run, evaluation)
    return evaluation


def evaluation_of_run(run: Run) -> Evaluation | None:
    """The evaluation of a run that another process trained: the one that it kept, or a new one, which is not kept.

    None if the job cannot be read again (a message says so), or without held-out samples or parameters.
    """
    final = [row for row in run.evaluations if row["final"]]
    if final and final[-1]["accuracy"] is not None:  # otherwise the event does not say which loss it has
        kept = final[-1]
        own = kept["loss"] is not None
        return Evaluation(kept["accuracy"], kept["loss"], kept["held_out"], kept["metrics"], own_loss=own)
    assert run.path is not None
    try:
        opened, _ = reopen(run.path)
        return opened.evaluate() if opened.data is not None and opened.data.num_test_samples else None
    except GradstreamError as error:
        say(f"not evaluated: {error}")
        return None


def keep_evaluation(run: Run, evaluation: Evaluation) -> None:
    """Adds the evaluation of the final parameters to the run's events, unless they have one.

    Then `gradstream runs` and reports show it. If the directory cannot be written, a message says so.
    """
    if run.path is None or any(row["final"] for row in run.evaluations):
        return
    last = run.history[-1] if run.history else {"epoch": 0, "step": -1}
    event = EvaluatedEvent(
        step=last["step"] + 1,
        epoch=last["epoch"],
        samples=run.summary["samples"],
        accuracy=evaluation.accuracy,
        loss=evaluation.loss,
        metrics=evaluation.metrics,
        held_out=evaluation.num_samples,
        final=True,
    )
    time_s = max((event["time_s"] for event in run.events), default=0.0)
    try:
        with (run.path / "events.jsonl").open("ab") as file:
            file.write(encode(event, node="launcher", time_s=time_s))
    except OSError as error:
        say(f"{run.path} does not keep the evaluation: {disk_error(error)}; {disk_remedy(error)}")
