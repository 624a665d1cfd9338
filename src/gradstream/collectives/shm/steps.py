"""Operations that can stop where they would have to wait, and go on in another thread.

An operation is a generator. It yields if the other ranks have not arrived within some microseconds; the rest of
it blocks. So the caller carries it out at once if all ranks arrive at about the same time, and needs a thread only
if they do not.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""An operation that returns T. After a yield it blocks until others arrive, or a deadline is over."""


def finish(steps: Steps[T]) -> T:
    """Carries out the rest of an operation; blocks this thread if it has to wait."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
