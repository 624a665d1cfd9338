"""What a run is doing now, in one line: a pure state fed with events."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradstream.report.held import turn_text
from gradstream.untrusted import escaped

if TYPE_CHECKING:
    from gradstream.report.summary import EventDict

__all__ = ["ProgressLine"]

WINDOW_S = 10.0
"""Rates are means over this much of the run's own time."""

LINE_BYTES = 1024

LOGGED_SHOWN = 4
"""Figures of a loop's own on the line, the loss included; the table at the end has all."""

LOSS_MEMORY = 0.95
"""The loss shown is an exponential moving average over minibatches, with this decay."""


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


class ProgressLine:
    """Follows a run by its events. It reads no clock: time is the events' own `time_s`.

    Attributes:
        step: minibatches done over all workers; of a run in rounds: those.
        total_steps: of the whole run, 0 while not known.
        loss: smoothed, None while not known.
        logged: what a loop of the user's own has logged, by name: the latest values, NaN where not finite.
        held_out: what the latest evaluation found, in words; "" while there is none.
        workers: names of the workers that are in.
    """

    def __init__(self) -> None:
        self.step = 0
        self.total_steps = 0
        self.loss: float | None = None
        self.logged: dict[str, float] = {}
        self.held_out = ""  # the latest evaluation
        self.workers: set[str] = set()
        self._held: set[str] = set()  # by the strategy's drive
        self._machines: dict[str, str] = {}  # of nodes elsewhere
        self._expected_workers = 0
        self._by_round = False
        self._resumed_at = 0
        self._steps_ahead: dict[int, int] = {}  # of each worker, in the whole run, as its loop says
        self._steps_of_rank: dict[int, int] = {}
        self._loss_weight = 0.0
        self._began_s: float | None = None
        self._now_s = 0.0
        self._samples, self._steps, self._bytes = _Window(), _Window(), _Window()
        self._staleness, self._chunks = _Window(), _Window()
        self._exchanged = False  # nodes tell what they have exchanged from time to time

    def update(self, event: EventDict) -> None:
        """Takes in one event; kinds that a progress line does not show are passed over."""
        self._now_s = max(self._now_s, event["time_s"])
        match event["event"]:
            case "started":
                self.total_steps = event["total_steps"]
                self._expected_workers = event["workers"]
                self._by_round = event.get("in_rounds", False)
            case "joined" if event["who"].startswith("worker"):
                self.workers.add(event["who"])
            case "machine" if event["state"] == "joined":
                self._machines.update(dict.fromkeys(event["nodes"], event["who"]))
            case "left":
                self.workers.discard(event["who"])
            case "participation":
                self._held = set(event["paused"])
            case "resumed":
                self.step = self._resumed_at = event["step"]
            case "step":
                self._update_step(event)
            case "log":
                self._update_log(event)
            case "evaluated":
                self.held_out = _evaluation(event)
            case "exchange":
                self._update_exchange(event)
            case _:
                pass

    def news(self, event: EventDict) -> str:
        """What is worth a line of its own about an event that `update` has taken in; else "".

        Names and reasons in it are those of other nodes: they are escaped.
        """
        return escaped(self._news(event), LINE_BYTES)

    def _news(self, event: EventDict) -> str:
        match event["event"]:
            case "participation":
                return turn_text(event)
            case "left" if event["lost"]:
                machine = self._machines.get(event["who"])
                return f"lost {event['who']}{f' on {machine}' if machine else ''}: {event['reason']}"
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
        # All workers take part in a round: the worker that is furthest has begun the newest.
        done = max(self.step, count) if self._by_round else self.step + 1
        self._steps.add(now_s, done - self.step)
        self._samples.add(now_s, event["samples"])
        self.step = done
        if event["loss"] is not None and event["samples"]:
            self._loss_weight = LOSS_MEMORY * self._loss_weight + (1 - LOSS_MEMORY)
            share = (1 - LOSS_MEMORY) / self._loss_weight  # unbiased from the first value on
            before = event["loss"] if self.loss is None else self.loss
            self.loss = before + share * (event["loss"] - before)

    def _update_log(self, event: EventDict) -> None:
        for name, value in event["values"].items():
            self.logged[name] = math.nan if value is None else value
        if event["total_steps"]:
            ahead = self._steps_ahead
            ahead[event["rank"]] = event["total_steps"]
            mean = sum(ahead.values()) / len(ahead)  # of workers that have not said it, too
            self.total_steps = max(ahead.values()) if self._by_round else round(mean * self._expected_workers)

    def _update_exchange(self, event: EventDict) -> None:
        now_s = event["time_s"]
        self._exchanged = True
        self._bytes.add(now_s, event["pushed_bytes"] + event["fetched_bytes"])
        for tau, chunks in event["staleness"].items():
            self._staleness.add(now_s, int(tau) * chunks)
            self._chunks.add(now_s, chunks)

    def _rate(self, window: _Window) -> float:
        return 0.0 if self._began_s is None else window.per_s(self._now_s, self._began_s)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all workers, over the last seconds."""
        return self._rate(self._samples)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the present rate, None while not known."""
        rate = self._rate(self._steps)
        return max(self.total_steps - self.step, 0) / rate if rate > 0 and self.total_steps else None

    @property
    def fraction(self) -> float:
        """How much of the run is done, 0 to 1; 0 while not known."""
        return min(self.step / self.total_steps, 1.0) if self.total_steps else 0.0

    def line(self) -> str:
        """The run in one line; what is not known yet is left out."""
        return escaped(self._line(), LINE_BYTES)

    def _line(self) -> str:
        if self._began_s is None:
            return f"starting: {len(self.workers)}/{self._expected_workers or '?'} workers are in"
        parts = [f"step {self.step:,}" + (f"/{self.total_steps:,}" if self.total_steps else "")]
        loss = {} if self.loss is None else {"loss": self.loss}
        named = list((loss | self.logged).items())  # a loop knows its loss best
        parts += [f"{name} {value:.4g}" for name, value in named[:LOGGED_SHOWN]]
        if self.held_out:
            parts.append(self.held_out)
        parts.append(f"{self.samples_per_s:,.0f} samples/s")
        if self.eta_s is not None:
            parts.append(f"ETA {_clock(self.eta_s)}")
        elif not self.total_steps:
            parts.append(f"{_clock(self._now_s - self._began_s)} so far")
        machines = len(set(self._machines.values()))
        on = f" on {machines + 1} machines" if machines else ""
        held = len(self._held & self.workers)
        back = f" ({held} held back)" if held else ""
        if self.workers:  # at the end all of them have left
            parts.append(f"{len(self.workers)}/{self._expected_workers} workers{on}{back}")
        if self._exchanged:
            parts.append(f"{self._rate(self._bytes) / 1e6:,.1f} MB/s")
        chunks = self._rate(self._chunks)
        if chunks > 0:
            parts.append(f"staleness {self._rate(self._staleness) / chunks:.1f}")
        return " · ".join(parts)


def _evaluation(event: EventDict) -> str:
    """Such as "held out: accuracy 91.2%, top5 0.99"; what was not told is left out."""
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
