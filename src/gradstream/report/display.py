"""Shows a run's progress on stderr: one live line on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gradstream.report.progress_line import ProgressLine
from gradstream.untrusted import lose_stderr

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from gradstream.telemetry.events import EventDict

PLAIN_EVERY_S = 5.0
PLAIN_EVERY_FRACTION = 0.1
NOTEBOOK_EVERY_S = 0.5


@contextmanager
def shown(
    on_event: Callable[[Mapping[str, Any]], None] | None, progress: bool | None
) -> Iterator[Callable[[Mapping[str, Any]], None] | None]:
    """Shows the progress of a run that is started in Python; yields what has to be called with its events.

    Args:
        on_event: the user's own function, which is called as well; None for none.
        progress: whether to show it. None does where somebody looks on, at a terminal or in a notebook, and has no
            `on_event`.
    """
    if progress is None:
        progress = on_event is None and (in_notebook() or _is_terminal())
    if not progress:
        yield on_event
        return
    with Display() as display:

        def each(event: Mapping[str, Any]) -> None:
            display.on_event(dict(event))
            if on_event is not None:
                on_event(event)

        yield each


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython() if ipython is not None else None, "kernel")


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class Display:
    """Shows the progress of a run. Use it as a context manager, and pass its `on_event` to `train` or `simulate`.

    Args:
        console: where lines are shown; standard error by default. rich honours NO_COLOR and TERM.
        now: returns the time in seconds, by which plain lines are due.
    """

    def __init__(self, console: Console | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._rewrites = console is None and in_notebook()  # its output knows no escape sequences, but \r
        from rich.console import Console  # `import gradstream` has no use for it

        no_html = False if self._rewrites else None
        self._console = console or Console(
            stderr=True, highlight=False, soft_wrap=True, force_jupyter=no_html, force_terminal=no_html
        )
        self._written = ""  # the line that is written anew
        self._now = now
        self._progress = ProgressLine()
        self._live: Live | None = None
        self._shown_at_s = now()
        self._shown_fraction = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.live import Live
            from rich.text import Text

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
        elif self._written:
            self._print("")

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
            if self._rewrites:
                self._write(line, "\n")
            else:
                self._console.print(line, markup=False)
        except OSError:  # a full disk, or nobody reads the pipe
            lose_stderr()

    def _write(self, line: str, end: str = "") -> None:
        """Writes a line over the one before, in a notebook."""
        sys.stderr.write(f"\r{line.ljust(len(self._written))}{end}")
        sys.stderr.flush()
        self._written = "" if end else line

    def _show_plain(self) -> None:
        """Prints a line where another tenth of the run is done, or `PLAIN_EVERY_S` after the last line."""
        now_s, fraction = self._now(), self._progress.fraction
        if self._rewrites:
            if now_s >= self._shown_at_s + NOTEBOOK_EVERY_S:
                self._write(self._progress.line())
                self._shown_at_s = now_s
            return
        grown = fraction >= self._shown_fraction + PLAIN_EVERY_FRACTION
        if self._progress.step and (grown or now_s >= self._shown_at_s + PLAIN_EVERY_S):
            self._print(self._progress.line())
            self._shown_at_s, self._shown_fraction = now_s, fraction
