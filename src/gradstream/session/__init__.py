"""Runs a user's training loop on many workers."""

from gradstream.session.joining import join
from gradstream.session.session import Session

__all__ = ["Session", "join"]
