"""Callbacks: the user's objects that get the events of a run while it goes on.

They run in the process that called `train`, each on its own thread with a bounded queue, so that no callback can
stop or slow down a run. A callback that raises is not called again, and its traceback is printed. A callback that
is too slow misses events; their number is printed at the end. A simulation calls callbacks on its own thread, and
no virtual time passes meanwhile.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradstream.errors import ConfigError, GradstreamError
from gradstream.untrusted import tell

if TYPE_CHECKING:
    from gradstream.telemetry.events import EventDict

METHODS = ("on_start", "on_step", "on_evaluate", "on_log", "on_end")
"""A callback has some of: on_start(info), on_step(event), on_evaluate(event), on_log(event), on_end(run)."""

METHOD_OF_EVENT = {"started": "on_start", "step": "on_step", "evaluated": "on_evaluate", "log": "on_log"}

QUEUE_EVENTS = 4096
PATIENCE_S = 30.0
"""Seconds that a callback may take to catch up once the run is over."""


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raises ConfigError for a callback that has none of the methods."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks={callbacks!r}: expected a list of objects")
    for index, callback in enumerate(callbacks):
        if isinstance(callback, type) or not any(callable(getattr(callback, name, None)) for name in METHODS):
            raise ConfigError(
                f"callbacks[{index}] is {callback!r}: expected an object with at least one of the methods "
                + ", ".join(METHODS)
            )


class Callbacks:
    """All callbacks of one run.

    Args:
        callbacks: checked by `check_callbacks`.
        info: entries of `on_start` besides those of the started event: name, run_dir.
        threads: whether each callback has its own thread; otherwise they are called directly.
        complain: called with messages for the user; None prints them on stderr.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        info: Mapping[str, Any],
        *,
        threads: bool = True,
        complain: Callable[[str], object] | None = None,
    ) -> None:
        listener = _Threaded if threads else _Listener
        self._listeners = [listener(callback, complain or tell) for callback in callbacks]
        self._info = dict(info)

    def tell(self, event: EventDict) -> None:
        """Passes an event of the run to the callbacks. Never raises, never blocks."""
        method = METHOD_OF_EVENT.get(event["event"])
        if method is None:
            return
        argument = {**event, **self._info} if method == "on_start" else event
        for listener in self._listeners:
            for call, condensed in listener.condensed(method, argument):
                listener.tell(call, condensed)

    def beside(self, on_event: Callable[[EventDict], None] | None) -> Callable[[EventDict], None]:
        """A function that passes an event to the callbacks, and then to `on_event`."""

        def notify(event: EventDict) -> None:
            self.tell(event)
            if on_event is not None:
                on_event(event)

        return notify

    def end(self, load: Callable[[], object]) -> None:
        """Ends the callbacks of a finished or failed run; waits up to PATIENCE_S for slow ones.

        Args:
            load: returns the run; called only if there are callbacks.
        """
        if not self._listeners:
            return
        run: object | None = None
        try:
            run = load()
        except GradstreamError:
            pass  # the run ended before there was anything to load
        for listener in self._listeners:
            listener.tell_end(run)
        for listener in self._listeners:
            listener.close()


class _Listener:
    """One callback, called directly."""

    def __init__(self, callback: Any, complain: Callable[[str], object]) -> None:
        self._callback = callback
        self._complain = complain
        self._dropped = False  # whether it has raised

    @property
    def name(self) -> str:
        return type(self._callback).__name__

    def condensed(self, method: str, argument: Any) -> list[tuple[str, Any]]:
        """The calls that an event becomes; our trackers condense events to points before they are queued."""
        condense = getattr(self._callback, "condense", None)
        return [(method, argument)] if condense is None else condense(method, argument)

    def tell(self, method: str, argument: Any) -> None:
        self._call(method, argument)

    def tell_end(self, run: object | None) -> None:
        if run is not None:
            self._call("on_end", run)

    def close(self) -> None:
        pass

    def _call(self, method: str, argument: Any) -> None:
        call = getattr(self._callback, method, None)
        if call is None or self._dropped:
            return
        try:
            call(argument)
        except Exception:
            self._dropped = True
            text = traceback.format_exc().rstrip()
            self._complain(
                f"gradstream: the callback {self.name} raised in {method} and is not called any more; "
                f"the run goes on\n{text}\n"
            )


class _Threaded(_Listener):
    """One callback, on its own thread."""

    def __init__(self, callback: Any, complain: Callable[[str], object]) -> None:
        super().__init__(callback, complain)
        self._queue: queue.Queue[tuple[str, Any] | None] = queue.Queue(QUEUE_EVENTS)
        self._num_missed = 0
        self._thread = threading.Thread(target=self._work, name=f"callback-{self.name}", daemon=True)
        self._thread.start()

    def tell(self, method: str, argument: Any) -> None:
        if not hasattr(self._callback, method) or self._dropped:
            return
        try:
            self._queue.put_nowait((method, argument))
        except queue.Full:
            self._num_missed += 1

    def tell_end(self, run: object | None) -> None:
        if self._num_missed:
            self._complain(
                f"gradstream: the callback {self.name} was slower than the run and has missed "
                f"{self._num_missed:,} events\n"
            )
        try:
            if run is not None:
                self._queue.put(("on_end", run), timeout=PATIENCE_S)
            self._queue.put(None, timeout=PATIENCE_S)
        except queue.Full:
            pass  # the callback hangs: close() prints a message

    def close(self) -> None:
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._complain(
                f"gradstream: the callback {self.name} is still busy {PATIENCE_S:g} s after the end of the "
                "run; it is left to itself\n"
            )

    def _work(self) -> None:
        while (argument := self._queue.get()) is not None:
            self._call(*argument)
