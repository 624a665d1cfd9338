"""Describes the state of a run in one line: a pure state machine of its events."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gradstream.report.worker_figures import phase_text, relay_text
from gradstream.untrusted import escaped, lose_stderr

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from gradstream.telemetry.events import EventDict


# ---- progress line -----------------------------------------------------------------------

WINDOW_S = 10.0
"""Period over which rates are averaged, in seconds of the run's own time."""

LINE_BYTES = 1024

LOGGED_SHOWN = 4
"""Number of the user's own metrics on the line, including the loss; the table at the end shows all of them."""

LOSS_MEMORY = 0.95
"""The loss shown is an exponential moving average over minibatches, with this decay."""


def entering_text(event: EventDict) -> str:
    """An "entering" event in words."""
    what = "it has called session.wrap, and its loop has not computed a gradient yet"
    return f"the others wait for {event['node']}, for {event['limit_s']:g} s at most: {what}"


_TEXTS = {"phase": phase_text, "relay": relay_text, "entering": entering_text}


@dataclass(slots=True)
class _Window:
    """Sums of amounts over the last `WINDOW_S` of a run's time."""

    entries: deque[tuple[float, float]] = field(default_factory=deque)
    total: float = 0.0

    def add(self, time_s: float, amount: float) -> None:
        self.entries.append((time_s, amount))
        self.total += amount

    def per_s(self, now_s: float, began_s: float) -> float:
        while self.entries and self.entries[0][0] <= now_s - WINDOW_S:
            self.total -= self.entries.popleft()[1]
        length_s = min(WINDOW_S, now_s - began_s)
        return self.total / length_s if length_s > 0 else 0.0


@dataclass(slots=True)
class _MeanLoss:
    """An exponential moving average of losses, corrected for the bias of its first values; None before them."""

    value: float | None = None
    weight: float = 0.0

    def add(self, loss: float) -> None:
        self.weight = LOSS_MEMORY * self.weight + (1 - LOSS_MEMORY)
        share = (1 - LOSS_MEMORY) / self.weight
        before = loss if self.value is None else self.value
        self.value = before + share * (loss - before)


@dataclass(slots=True)
class _Members:
    """The workers of a run, and the machines of nodes that run elsewhere."""

    expected: int = 0
    workers: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)  # nodes that have joined, even if lost since
    gone: set[str] = field(default_factory=set)  # nodes that have left or were lost, and are not back
    back: bool = False  # whether the node that joined last was known
    machines: dict[str, str] = field(default_factory=dict)  # by node
    away: set[str] = field(default_factory=set)  # machines that have left

    def joined(self, who: str) -> None:
        """Notes that a node has joined, possibly in an earlier phase."""
        self.back = who in self.known
        self.known.add(who)
        self.gone.discard(who)
        if who.startswith("worker"):
            self.workers.add(who)

    def left(self, who: str, *, lost: bool) -> None:
        """Notes that a node has left."""
        self.workers.discard(who)
        self.gone.add(who)
        if not lost:
            self.known.discard(who)

    def __str__(self) -> str:
        there = {machine for node, machine in self.machines.items() if node not in self.gone}
        machines = len(there - self.away)
        on = f" on {machines + 1} machines" if machines else ""
        return f"{len(self.workers)}/{max(self.expected, len(self.workers))} workers{on}"


@dataclass(slots=True)
class _Exchange:
    """The amounts that nodes have exchanged, as they report them from time to time."""

    reported: bool = False
    bytes: _Window = field(default_factory=_Window)
    staleness: _Window = field(default_factory=_Window)  # summed over chunks
    chunks: _Window = field(default_factory=_Window)

    def add(self, event: EventDict) -> None:
        now_s = event["time_s"]
        self.reported = True
        self.bytes.add(now_s, event["pushed_bytes"] + event["fetched_bytes"])
        for tau, chunks in event["staleness"].items():
            self.staleness.add(now_s, int(tau) * chunks)
            self.chunks.add(now_s, chunks)


class ProgressLine:
    """Follows a run by its events and describes its state. It reads no clock: events carry their own `time_s`.

    Attributes:
        step: number of minibatches that the workers have done together; of rounds, in a run with rounds.
        total_steps: number of steps in the whole run; 0 if unknown.
        logged: latest values that the user's own loop has logged, by name; NaN for a value that is not finite.
        held_out: the latest evaluation in words; "" if there is none yet.
    """

    def __init__(self) -> None:
        self.step = 0
        self.total_steps = 0
        self.logged: dict[str, float] = {}
        self.held_out = ""
        self._loss = _MeanLoss()
        self._members = _Members()
        self._exchange = _Exchange()
        self._by_round = False
        self._resumed_at = 0
        self._total_of_rank: dict[
            int, int
        ] = {}  # steps of a worker in the whole run, as its own loop reports
        self._steps_of_rank: dict[int, int] = {}
        self._began_s: float | None = None
        self._now_s = 0.0
        self._samples, self._steps = _Window(), _Window()

    @property
    def loss(self) -> float | None:
        """The smoothed loss; None while unknown."""
        return self._loss.value

    def update(self, event: EventDict) -> None:
        """Handles one event; ignores the kinds that a progress line does not show."""
        self._now_s = max(self._now_s, event["time_s"])
        match event["event"]:
            case "started":
                self.total_steps = event["total_steps"]
                self._members.expected = event["workers"]
                self._by_round = event.get("in_rounds", False)
            case "phase":
                self.total_steps = event["total_steps"]
                self._members.expected, self._by_round = event["workers"], event["in_rounds"]
            case "joined":
                self._members.joined(event["who"])
            case "machine" if event["state"] == "joined":
                self._members.machines.update(dict.fromkeys(event["nodes"], event["who"]))
                self._members.away.discard(event["who"])
            case "machine" if event["state"] == "left":
                self._members.away.add(event["who"])
            case "left":
                self._members.left(event["who"], lost=event["lost"])
            case "resumed":
                self.step = self._resumed_at = event["step"]
            case "step":
                self._update_step(event)
            case "log":
                self._update_log(event)
            case "evaluated":
                self.held_out = _evaluation(event)
            case "exchange":
                self._exchange.add(event)
            case _:
                pass

    def notice(self, event: EventDict) -> str:
        """A line about an event that the user should know about; "" for any other event. Call `update` first.

        Names and reasons come from other nodes, so they are escaped.
        """
        return escaped(self._notice(event), LINE_BYTES)

    def _notice(self, event: EventDict) -> str:
        match event["event"]:
            case "phase" | "relay" | "entering" as kind:
                return _TEXTS[kind](event)
            case "left" if event["lost"]:
                machine = self._members.machines.get(event["who"])
                return f"lost {event['who']}{f' on {machine}' if machine else ''}: {event['reason']}"
            case "exited" if event["status"] < 0 and event.get("how"):
                return f"the process of {event['who']} {event['how']}"
            case "gradient_refused":
                where = f"{event['who']}, step {event['step']} (data epoch {event['epoch']}, batch {event['batch']})"
                return f"refused a gradient of {where}: {event['what']}"
            case "left" if event["reason"]:
                return f"{event['who']} has left: {event['reason']}"
            case "coordinator" if event["ruling"] > 1:
                return "the coordinator had died: a new process has taken its place"
            case "joined" if event["epoch"] > 1 and self._members.back:
                return f"{event['who']} is back: a new process has taken its place"
            case "machine":
                what = f"machine {event['who']} ({event['address']})"
                if event["state"] == "joined":
                    return f"{what} has joined with {', '.join(event['nodes'])}"
                how = "was refused" if event["state"] == "refused" else "has left"
                return f"{what} {how}: {event['reason']}"
            case "waiting":
                return str(event["state"])
            case "insecure":
                return (
                    f"WARNING: --insecure: traffic at {event['address']} is plain text; anybody who can "
                    "reach it can read and change the model"
                )
            case _:
                return ""

    def _update_step(self, event: EventDict) -> None:
        now_s, rank = event["time_s"], event["rank"]
        if self._began_s is None:
            self._began_s = now_s - event["compute_s"]
        count = self._steps_of_rank[rank] = self._steps_of_rank.get(rank, self._resumed_at) + 1
        # All workers take part in a round: the most advanced worker has begun the newest round.
        done = max(self.step, count) if self._by_round else self.step + 1
        self._steps.add(now_s, done - self.step)
        self._samples.add(now_s, event["samples"])
        self.step = done
        if event["loss"] is not None and event["samples"]:
            self._loss.add(event["loss"])

    def _update_log(self, event: EventDict) -> None:
        for name, value in event["values"].items():
            self.logged[name] = math.nan if value is None else value
        if event["total_steps"]:
            totals = self._total_of_rank
            totals[event["rank"]] = event["total_steps"]
            mean = sum(totals.values()) / len(totals)  # also for workers without a report
            workers = self._members.expected
            self.total_steps = max(totals.values()) if self._by_round else round(mean * workers)

    def _rate(self, window: _Window) -> float:
        return 0.0 if self._began_s is None else window.per_s(self._now_s, self._began_s)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all workers, averaged over `WINDOW_S`."""
        return self._rate(self._samples)

    @property
    def eta_s(self) -> float | None:
        """Seconds until the run ends at the present rate; None while unknown."""
        rate = self._rate(self._steps)
        return max(self.total_steps - self.step, 0) / rate if rate > 0 and self.total_steps else None

    @property
    def fraction(self) -> float:
        """The fraction of the run that is done, 0 to 1; 0 if unknown."""
        return min(self.step / self.total_steps, 1.0) if self.total_steps else 0.0

    def line(self) -> str:
        """The state of the run in one line, without figures that are not known yet."""
        return escaped(self._line(), LINE_BYTES)

    def _line(self) -> str:
        if self._began_s is None:
            members = self._members
            return f"starting: {len(members.workers)}/{members.expected or '?'} workers are in"
        parts = [f"step {self.step:,}" + (f"/{self.total_steps:,}" if self.total_steps else "")]
        loss = {} if self.loss is None else {"loss": self.loss}
        named = list((loss | self.logged).items())  # the loop's own logged loss replaces the smoothed loss
        parts += [f"{name} {value:.4g}" for name, value in named[:LOGGED_SHOWN]]
        if self.held_out:
            parts.append(self.held_out)
        parts.append(f"{self.samples_per_s:,.0f} samples/s")
        if self.eta_s is not None:
            parts.append(f"ETA {_clock(self.eta_s)}")
        elif not self.total_steps:
            parts.append(f"{_clock(self._now_s - self._began_s)} so far")
        if self._members.workers:  # at the end all of them have left
            parts.append(str(self._members))
        if self._exchange.reported:
            parts.append(f"{self._rate(self._exchange.bytes) / 1e6:,.1f} MB/s")
        chunks = self._rate(self._exchange.chunks)
        if chunks > 0:
            parts.append(f"staleness {self._rate(self._exchange.staleness) / chunks:.1f}")
        return " · ".join(parts)


def _evaluation(event: EventDict) -> str:
    """An evaluation in words: "held out: accuracy 91.2%, top5 0.99". Values that are None are skipped."""
    named = {"accuracy": event["accuracy"], "loss": event["loss"], **event["metrics"]}
    shown = [
        f"{name} {value:.1%}" if name == "accuracy" else f"{name} {value:.4g}"
        for name, value in named.items()
        if value is not None
    ]
    return f"held out: {', '.join(shown)}" if shown else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# ---- display -----------------------------------------------------------------------------
# Shows a run's progress on stderr: one live line on a terminal or in a notebook, plain lines elsewhere.

PLAIN_EVERY_S = 5.0
PLAIN_EVERY_FRACTION = 0.1
NOTEBOOK_EVERY_S = 0.5


@contextmanager
def shown(
    on_event: Callable[[Mapping[str, Any]], None] | None, progress: bool | None
) -> Iterator[Callable[[Mapping[str, Any]], None] | None]:
    """Shows the progress of a run that is started in Python; yields the function to call with its events.

    Args:
        on_event: the user's own function, which is called as well; None for none.
        progress: whether to show it. None shows it if somebody is watching, at a terminal or in a notebook, and
            there is no `on_event`.
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
        now: returns the time in seconds, for the interval between plain lines.
    """

    def __init__(self, console: Console | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._rewrites = console is None and in_notebook()  # its output understands only \r
        from rich.console import Console  # not needed by `import gradstream`

        no_html = False if self._rewrites else None
        self._console = console or Console(
            stderr=True, highlight=False, soft_wrap=True, force_jupyter=no_html, force_terminal=no_html
        )
        self._written = ""  # the line that is rewritten
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
        """Overwrites the previous line, in a notebook."""
        sys.stderr.write(f"\r{line.ljust(len(self._written))}{end}")
        sys.stderr.flush()
        self._written = "" if end else line

    def _show_plain(self) -> None:
        """Prints a line when another tenth of the run is done, or `PLAIN_EVERY_S` after the last line."""
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
