"""From what a node reported of its failure back to an exception.

Only names and texts travel, never objects: `FailedEvent` has the class name, the message and the
traceback, and this makes the exception that the launcher, or a simulation, raises in their stead.
"""

from __future__ import annotations

import re

from gradstream import errors
from gradstream.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    DiskError,
    GradientError,
    GradstreamError,
    InternalError,
    PeerLostError,
    RefusedError,
    UserCodeError,
)
from gradstream.untrusted import escaped

__all__ = ["typed_error"]

NAME_BYTES, MESSAGE_BYTES, TRACEBACK_BYTES = 128, 8192, 1 << 16

_OF_USER = {cls.__name__: cls for cls in (UserCodeError, GradientError, DataError)}
_OF_PEER = {cls.__name__: cls for cls in (PeerLostError, DeadlineError)}


def typed_error(culprit: str, error: str, message: str, traceback_text: str) -> GradstreamError:
    """The exception that a node has reported by name. Its texts are escaped; newlines stay."""
    culprit, error = escaped(culprit, NAME_BYTES), escaped(error, NAME_BYTES)
    message = escaped(message, MESSAGE_BYTES, newlines=True)
    traceback_text = escaped(traceback_text, TRACEBACK_BYTES, newlines=True)
    if error in _OF_USER:
        return _OF_USER[error](message if culprit in message else f"{culprit}: {message}", traceback_text)
    if error in _OF_PEER:
        return _OF_PEER[error](*_peer_of(culprit, message))
    if error == "RefusedError" and (found := re.match(r"(\S+) refused \((\w+)\): (.*)", message, re.DOTALL)):
        return RefusedError(found[1], found[2], found[3])
    kind = getattr(errors, error, None)
    for base in (InternalError, ConfigError, DiskError, GradstreamError):
        if isinstance(kind, type) and issubclass(kind, base):
            made = (kind if base is InternalError else base)(f"{culprit}: {message}")
            if base is InternalError and traceback_text:
                made.add_note(traceback_text)
            return made
    # An exception of the user's, outside of the functions that wrap theirs, or a bug of ours.
    return UserCodeError(f"{culprit}: {error}: {message}", traceback_text)


def _peer_of(culprit: str, message: str) -> tuple[str, str]:
    """The node that a message begins with, or else the one that sent it, and the rest."""
    found = re.match(r"(coordinator|(?:shard|worker)-\d+): (.*)", message, re.DOTALL)
    return (found[1], found[2]) if found else (culprit, message)
