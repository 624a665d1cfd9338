"""Operations that can stop where they would have to wait, and go on in another thread.

An operation is a generator: it yields when the other ranks have not come within some microseconds; what is
left of it blocks. So whoever asks for one carries it out on the spot where all ranks come at about the same
time, and needs a thread only where they do not.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

__all__ = ["Steps", "finish"]

T = TypeVar("T")

Steps = Generator[None, None, T]
"""An operation that returns T: what comes after a yield blocks until others come, or a deadline is over."""


def finish(steps: Steps[T]) -> T:
    """Carries out what is left of an operation; blocks this thread where it has to."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
