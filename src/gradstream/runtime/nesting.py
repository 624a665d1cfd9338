"""One event loop inside another, as in a notebook's cell that runs a simulation.

asyncio lets a thread run one loop at a time, because the outer loop stands still while the inner one waits.
A loop on virtual time waits for nothing outside of it: for the outer loop it is a function that takes some
time.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def standing_still() -> Iterator[None]:
    """Suspends the loop that runs in this thread, if there is one: another loop can run in the context.

    Ctrl-C raises KeyboardInterrupt meanwhile. asyncio would cancel a task instead, which would have to wait
    for the suspended loop.
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
    """Replaces asyncio's own handler of Ctrl-C; any other handler stays, also one that ignores it."""
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
