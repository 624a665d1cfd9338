"""All exceptions of gradstream, sorted by the side that must act.

::

    GradstreamError
    ├── ConfigError (ValueError)        you: an argument, an option, a file
    │   └── UnknownNameError            you: a misspelt name; carries the nearest match
    ├── PreflightError                  you: a check before the start failed
    ├── UserCodeError                   you: your function raised
    │   ├── GradientError (ValueError)  you: a gradient or loss that cannot be used
    │   │   └── NonFiniteError          you: it has a NaN or an infinity
    │   ├── DataError (ValueError)      you: a data set that cannot be read
    │   └── ReplicasDifferError         replicas differ: your loop, or the machines, or a bug of ours
    ├── PeerLostError (ConnectionError) the machine or process of a peer is gone
    ├── DeadlineError (TimeoutError)    a peer was silent for longer than allowed
    ├── DiskError (OSError)             the disk of the run directory is full or broken
    ├── DivergedError                   a replay differs from the recorded run; says where
    ├── RefusedError                    a peer understood the request and said no
    │   └── JoinRefusedError            you: `gradstream join` with another token, file, data or version
    ├── ClosedError                     used after it was closed
    │   └── PeerCancelledError          a peer has cancelled the stream
    └── InternalError                   our bug: please report it
        └── LentMemoryError             memory written while it was lent

    SystemExit
    └── Interrupted                     you stopped the run, and can resume it: exit status 75

Every message says what is wrong, the value given, the value expected, where (rank, step, peer), and a remedy.
Expected outcomes (a stale push, a duplicate) are results, never exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

__all__ = [
    "EXIT_CODES",
    "RESUMABLE",
    "ClosedError",
    "ConfigError",
    "DataError",
    "DeadlineError",
    "DiskError",
    "DivergedError",
    "GradientError",
    "GradstreamError",
    "InternalError",
    "Interrupted",
    "JoinRefusedError",
    "LentMemoryError",
    "NonFiniteError",
    "PeerCancelledError",
    "PeerLostError",
    "PreflightError",
    "RefusedError",
    "ReplicasDifferError",
    "UnknownNameError",
    "UserCodeError",
    "exit_code",
]


EXIT_CODES = {
    0: "done",
    1: "failure: an error in your code, or in gradstream's",
    2: "wrong usage or configuration; nothing was started",
    3: "a check before the start failed (--dry-run, doctor)",
    4: "a node that the run needs, or data, was lost, or too few nodes came",
    75: "stopped, and a checkpoint is saved: resume it",
    130: "interrupted by Ctrl-C; nothing more was saved",
    143: "ended by SIGTERM; nothing more was saved",
}
"""Exit statuses of the command line. Schedulers rely on them: they do not change."""


RESUMABLE = 75
"""Exit status of a run that was stopped and can be resumed: EX_TEMPFAIL of sysexits.h."""


class GradstreamError(Exception):
    """Base of every exception that gradstream raises on purpose.

    `exit_status` is what the command line exits with: a key of `EXIT_CODES`.
    """

    exit_status: ClassVar[int] = 1


class ConfigError(GradstreamError, ValueError):
    """An argument, option or file is wrong. Nothing was started."""

    exit_status: ClassVar[int] = 2


class UnknownNameError(ConfigError):
    """A name that is not in a registry; the message carries the nearest match.

    Args:
        kind: kind of the name, "strategy" for example.
        got: the unknown name.
        known: all valid names.
    """

    def __init__(self, kind: str, got: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(got, names, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        super().__init__(f"unknown {kind} {got!r}{hint}; known: {', '.join(names) or 'none'}")
        self.nearest = near[0] if near else None


class DivergedError(GradstreamError):
    """A replay differs from the recorded run; the message names the first shard, chunk and update."""


class PreflightError(GradstreamError):
    """A check before the start failed; the run itself was not started."""

    exit_status: ClassVar[int] = 3


class UserCodeError(GradstreamError):
    """A function of the user has raised. `traceback_text` is the traceback of that function.

    Args:
        message: one line that names the rank and the step.
        traceback_text: the formatted traceback of the process where it happened.
        culprit: the worker whose message is to blame, if a shard raises; "" for none.
    """

    def __init__(self, message: str, traceback_text: str = "", culprit: str = "") -> None:
        super().__init__(message)
        self.traceback_text = traceback_text
        self.culprit = culprit


class GradientError(UserCodeError, ValueError):
    """A gradient of the wrong shape or dtype, or a gradient or loss that is not finite."""


class NonFiniteError(GradientError):
    """A gradient, a loss or an update has a NaN or an infinity. It did not enter the model that the run keeps."""


class DataError(UserCodeError, ValueError):
    """A data set that cannot be read, or does not fit the request."""


class ReplicasDifferError(UserCodeError):
    """Replicas that must be equal differ between workers.

    Args:
        message: names the step, the values, and what in the user's script may be the cause.
        traceback_text, culprit: see `UserCodeError`.
    """

    def __init__(self, message: str, traceback_text: str = "", culprit: str = "") -> None:
        told = message if self._OTHERWISE in message else f"{message}. {self._OTHERWISE}"
        super().__init__(told, traceback_text, culprit)

    _OTHERWISE = (
        "If the script does the same on every worker, it is something else: other versions of torch or of a library on "
        "one machine (`gradstream doctor`), a data file that differs there, operations of a GPU that sum in any order "
        "(torch.use_deterministic_algorithms), a machine that computes wrongly, or a bug of gradstream: please report "
        "it if two workers on one machine differ"
    )


class PeerLostError(GradstreamError, ConnectionError):
    """The connection to a peer broke. A request in flight was applied at most once.

    A push is safe to retry with the same sequence number; a fetch always is.

    Args:
        peer: name of the peer.
        message: what happened.
        nobody_listens: no process listens at the peer's address.
    """

    exit_status: ClassVar[int] = 4

    def __init__(self, peer: str, message: str, *, nobody_listens: bool = False) -> None:
        super().__init__(f"{peer}: {message}")
        self.peer = peer
        self.nobody_listens = nobody_listens


class DeadlineError(GradstreamError, TimeoutError):
    """A peer was silent for longer than allowed. As after `PeerLostError`, a retry is safe.

    Args:
        peer: name of the peer.
        what: what did not arrive in time.
        remedy: the likely cause, and what helps; "" if `what` says it.
    """

    exit_status: ClassVar[int] = 4

    def __init__(self, peer: str, what: str, remedy: str = "") -> None:
        super().__init__(f"{peer}: {what}" + (f": {remedy}" if remedy else ""))
        self.peer = peer
        self.what = what


class RefusedError(GradstreamError):
    """A peer understood the request and refused it; nothing was applied. `code` is a name of `v1.Code`."""

    def __init__(self, peer: str, code: str, message: str) -> None:
        super().__init__(f"{peer} refused ({code}): {message}")
        self.peer = peer
        self.code = code
        self.reason = message


class JoinRefusedError(RefusedError):
    """A launcher refuses this machine, or is not the expected launcher. Nothing was started on this machine."""

    exit_status: ClassVar[int] = 2


class DiskError(GradstreamError, OSError):
    """The disk of the run directory is full, broken or read-only; the message says what is lost."""


class ClosedError(GradstreamError):
    """The object was used after it was closed."""


class PeerCancelledError(ClosedError):
    """A peer has cancelled the stream; `cause` is a `v1.Cancel.Cause`, and `reason` says why in words."""

    def __init__(self, message: str, cause: int, reason: str) -> None:
        super().__init__(message)
        self.cause = cause
        self.reason = reason


class InternalError(GradstreamError):
    """An invariant of gradstream does not hold. Please report it."""


class Interrupted(SystemExit):
    """The run was stopped by Ctrl-C or SIGTERM, and can be resumed.

    It is not an error: like KeyboardInterrupt, it is not caught by `except Exception`. Uncaught, it ends a script
    with exit status 75 (EX_TEMPFAIL: run it again).

    Args:
        path: the run directory; None for a simulation.
        checkpoint: folder in it from which the run resumes; "" if the run starts over.
        command: command line that resumes the run.
    """

    def __init__(self, path: Path | None, checkpoint: str, command: str = "") -> None:
        super().__init__(RESUMABLE)
        self.path = path
        self.checkpoint = checkpoint
        self.command = command

    def __str__(self) -> str:
        kept = (
            f"it resumes from {self.checkpoint}"
            if self.checkpoint
            else "no checkpoint was made, so it begins anew"
        )
        return f"the run was stopped; {kept}" + (f": {self.command}" if self.command else "")


class LentMemoryError(InternalError):
    """Lent memory was written by its lender, or memory lent for writing was read."""


def exit_code(error: BaseException) -> int:
    """Exit status of the command line for an error: see `EXIT_CODES`."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    status = getattr(error, "exit_status", 130 if isinstance(error, KeyboardInterrupt) else 1)
    return int(status)
