"""Exceptions, sorted by who must act.

::

    GradstreamError
    ├── ConfigError (ValueError)        you: an argument, an option, a file
    │   └── UnknownNameError            you: a misspelt name; carries the nearest match
    ├── UserCodeError                   you: your function raised
    │   ├── GradientError (ValueError)  you: a gradient or loss that cannot be used
    │   └── DataError (ValueError)      you: a data set that cannot be read
    ├── PeerLostError (ConnectionError) the machine or process of a peer is gone
    ├── DeadlineError (TimeoutError)    a peer was silent for longer than allowed
    ├── RefusedError                    a peer understood the request and said no
    ├── ClosedError                     used after it was closed
    └── InternalError                   our bug: please report it
        └── LentMemoryError             memory written while it was lent

Every message says what, got, expected, where (rank, step, peer) and a remedy.
Expected outcomes (a stale push, a duplicate) are results, never exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ClosedError",
    "ConfigError",
    "DataError",
    "DeadlineError",
    "GradientError",
    "GradstreamError",
    "InternalError",
    "LentMemoryError",
    "PeerLostError",
    "RefusedError",
    "UnknownNameError",
    "UserCodeError",
    "exit_code",
]


class GradstreamError(Exception):
    """Base of every exception that gradstream raises on purpose."""


class ConfigError(GradstreamError, ValueError):
    """An argument, option or file is wrong. Nothing was started."""


class UnknownNameError(ConfigError):
    """A name that is not in a registry; the message carries the nearest match.

    Args:
        kind: what was being looked up, "strategy" for example.
        got: the name as written.
        known: every legal name.
    """

    def __init__(self, kind: str, got: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(got, names, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        super().__init__(f"unknown {kind} {got!r}{hint}; known: {', '.join(names)}")
        self.nearest = near[0] if near else None


class UserCodeError(GradstreamError):
    """A function of the user's raised. `traceback_text` is its own traceback.

    Args:
        message: one line that names the rank and the step.
        traceback_text: the formatted traceback of the process where it happened.
    """

    def __init__(self, message: str, traceback_text: str = "") -> None:
        super().__init__(message)
        self.traceback_text = traceback_text


class GradientError(UserCodeError, ValueError):
    """A gradient of the wrong shape or dtype, or a gradient or loss that is not finite."""


class DataError(UserCodeError, ValueError):
    """A data set that cannot be read, or does not fit the request."""


class PeerLostError(GradstreamError, ConnectionError):
    """The connection to a peer broke. What was in flight is unknown: 0 or 1 times applied.

    A push is safe to retry with the same sequence number; a fetch always is.
    """

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(f"{peer}: {message}")
        self.peer = peer


class DeadlineError(GradstreamError, TimeoutError):
    """A peer was silent for longer than its deadline. As after `PeerLostError`, safe to retry."""

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(f"{peer}: {message}")
        self.peer = peer


class RefusedError(GradstreamError):
    """A peer understood and refused; nothing was applied. `code` is a name of `wire.Code`."""

    def __init__(self, peer: str, code: str, message: str) -> None:
        super().__init__(f"{peer} refused ({code}): {message}")
        self.peer = peer
        self.code = code
        self.reason = message


class ClosedError(GradstreamError):
    """The object was closed before, by this side."""


class InternalError(GradstreamError):
    """An invariant of gradstream's own does not hold. Please report it."""


class LentMemoryError(InternalError):
    """Memory that is lent out was written, or lent memory being written was read."""


def exit_code(error: BaseException) -> int:
    """Exit status of the command line for an error: 2 for usage and configuration, else 1."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, ConfigError) else 1
