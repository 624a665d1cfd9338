"""Shows a run's progress on stderr: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gradstream.cli.progress import ProgressLine
from gradstream.untrusted import lose_stderr

if TYPE_CHECKING:
    from gradstream.telemetry.events import EventDict

PLAIN_EVERY_S = 5.0
PLAIN_EVERY_FRACTION = 0.1


class Display:
    """Shows the progress of a run. Use it as a context manager, and pass its `on_event` to `train` or `simulate`.

    Args:
        console: where lines are shown; standard error by default. rich honours NO_COLOR and TERM.
        now: returns the time in seconds, by which plain lines are due.
    """

    def __init__(self, console: Console | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._now = now
        self._progress = ProgressLine()
        self._live: Live | None = None
        self._shown_at_s = now()
        self._shown_fraction = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=lambda: Text(self._progress.line(), overflow="ellipsis", no_wrap=True),
                console=self._console,
                refresh_per_second=4,
            )
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
        elif self._progress.step:
            self._print(self._progress.line())

    def on_event(self, event: EventDict) -> None:
        """Handles one event of the run, and shows the lines that are due."""
        self._progress.update(event)
        notice = self._progress.notice(event)
        if notice:
            self._print(notice)
        if self._live is None:
            self._show_plain()

    def _print(self, line: str) -> None:
        try:
            self._console.print(line, markup=False)
        except OSError:  # a full disk, or nobody reads the pipe
            lose_stderr()

    def _show_plain(self) -> None:
        """Prints a line where another tenth of the run is done, or `PLAIN_EVERY_S` after the last line."""
        now_s, fraction = self._now(), self._progress.fraction
        grown = fraction >= self._shown_fraction + PLAIN_EVERY_FRACTION
        if self._progress.step and (grown or now_s >= self._shown_at_s + PLAIN_EVERY_S):
            self._print(self._progress.line())
            self._shown_at_s, self._shown_fraction = now_s, fraction
