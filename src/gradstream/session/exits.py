"""What becomes of a session whose script ends without closing it: well, or by an exception.

A script that we start is told apart by who starts it (`script.py`). This is for scripts that somebody
else has started, torchrun for one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType

from gradstream.errors import Interrupted

__all__ = ["at_the_end"]


def at_the_end(close: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
    """Has `close` called when the script has ended, `fail` when an exception has ended it.

    Python waits for threads before it runs what `atexit` knows, and a session's threads wait for
    the session to be closed: so this is what `concurrent.futures`, too, registers with instead.
    """
    before = sys.excepthook

    def end() -> None:
        try:
            close()
        except Interrupted:
            pass  # the script ends because it was told so

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        fail(error)
        before(kind, error, trace)  # the last thing on the screen

    sys.excepthook = hook
    threading._register_atexit(end)  # type: ignore[attr-defined]
