"""One event loop inside of another: what a notebook's cell does that runs a simulation.

asyncio lets a thread run one loop at a time, since the outer one stands still while the inner one waits.
A loop on virtual time waits for nothing that is outside of it: to the outer one it is a function that
takes its time.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["standing_still"]


@contextmanager
def standing_still() -> Iterator[None]:
    """The loop that runs in this thread, if there is one, stands still: another one can run in the context.

    Ctrl-C is a KeyboardInterrupt meanwhile, though asyncio would cancel a task: that would have to wait for
    the loop that stands still.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task(loop)
    if task is not None:
        _leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        with _interruptible():
            yield
    finally:
        asyncio._set_running_loop(loop)
        if task is not None:
            _enter_task(loop, task)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Puts asyncio's own handler of Ctrl-C aside; anybody else's stays, and so does one that ignores it."""
    before = signal.getsignal(signal.SIGINT)
    waits = getattr(getattr(before, "func", before), "__module__", "").startswith("asyncio")
    if not waits or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
