"""The work of each worker over time, as rectangles: computing, waiting, pushing, fetching.

A step has its gradient at the time when it was computed, and waits before and after it. How long a worker waited for
each node is known; the order of the waits is a guess: sums come after the gradient, answers to a fetch before it. If
there are more steps than a page can hold, successive steps are drawn as one, whose height is divided in proportion.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gradstream.report.pauses import pauses_of
from gradstream.report.summary import begin_s
from gradstream.telemetry.events import EventDict

MAX_STEPS = 12_000
"""Most steps that are drawn one by one, over all workers."""
MAX_LANES = 64
REST = ""
"""In the place of a node's name: waiting that no node caused."""


@dataclass(frozen=True, slots=True)
class TimelinePiece:
    """A rectangle of waiting in a step: `top` and `bottom` are shares of the height, from the top.

    `name` is the node for which the worker waited, or REST.
    """

    begin_s: float
    end_s: float
    top: float
    bottom: float
    name: str


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step, or `count` successive steps drawn as one, from number `step` on."""

    step: int
    count: int
    begin_s: float
    end_s: float
    compute_at_s: float
    compute_s: float
    waited_for: tuple[tuple[str, float], ...]

    @property
    def wait_s(self) -> float:
        """Seconds of the step outside of computing."""
        return max(0.0, self.end_s - self.begin_s - self.compute_s)


@dataclass(frozen=True, slots=True)
class Band:
    """The time of a push, a fetch, an evaluation or a pause."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TimelineLane:
    """The work of one worker over time."""

    name: str
    steps: tuple[StepSpan, ...]
    pushes: tuple[Band, ...]
    fetches: tuple[Band, ...]
    evaluations: tuple[Band, ...] = ()
    pauses: tuple[Band, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """The work of all workers over time.

    Args:
        begin_s, end_s: the time that is shown.
        lanes: one for each worker, by rank.
        merged: largest number of steps that are drawn as one.
        left_out: number of workers that are not shown.
    """

    begin_s: float
    end_s: float
    lanes: tuple[TimelineLane, ...]
    merged: int
    left_out: int


def lanes_of(
    events: Iterable[EventDict], *, max_steps: int = MAX_STEPS, max_lanes: int = MAX_LANES
) -> Timeline:
    """The timeline of a run's workers.

    Args:
        events: events of the run.
        max_steps: most rectangles of steps.
        max_lanes: most workers; those of the lowest ranks are shown.
    """
    steps: defaultdict[int, list[EventDict]] = defaultdict(list)
    bands: defaultdict[tuple[str, str], list[Band]] = defaultdict(list)
    changes: list[EventDict] = []
    for event in events:
        if event["event"] == "participation":
            changes.append(event)
        elif event["event"] == "step":
            steps[event["rank"]].append(event)
        elif event["event"] == "transfer":
            span = Band(event["time_s"] - event["seconds"], event["time_s"])
            bands[event["node"], event["kind"]].append(span)
        elif event["event"] == "evaluated" and event.get("seconds"):
            span = Band(event["time_s"] - event["seconds"], event["time_s"])
            bands[event["node"], "evaluation"].append(span)
    shown = sorted(steps)[:max_lanes]
    every = [step for rank in shown for step in steps[rank]]
    merged = max(1, math.ceil(len(every) / max_steps))
    names = {rank: steps[rank][0]["node"] for rank in shown}
    evaluated = [band.end_s for name in names.values() for band in bands[name, "evaluation"]]
    end_s = max([*(step["time_s"] for step in every), *evaluated], default=0.0)
    pauses = pauses_of(changes, end_s)
    lanes = [
        TimelineLane(
            name,
            tuple(_merge(steps[rank], merged)),
            tuple(_fewer(bands[name, "push"], merged)),
            tuple(_fewer(bands[name, "fetch"], merged)),
            tuple(bands[name, "evaluation"]),
            tuple(Band(*span) for span in pauses.get(name, ())),
        )
        for rank, name in names.items()
    ]
    return Timeline(begin_s(every), end_s, tuple(lanes), merged, len(steps) - len(shown))


def _merge(steps: Sequence[EventDict], size: int) -> Iterator[StepSpan]:
    for first in range(0, len(steps), size):
        part = steps[first : first + size]
        waited: Counter[str] = Counter()
        for step in part:
            waited.update(step.get("waited_for", {}))
        begin = part[0]["time_s"] - part[0]["compute_s"] - part[0]["wait_s"]
        yield StepSpan(
            step=part[0]["step"],
            count=len(part),
            begin_s=begin,
            end_s=part[-1]["time_s"],
            compute_at_s=begin + part[0].get("compute_at_s", 0.0),
            compute_s=math.fsum(step["compute_s"] for step in part),
            waited_for=tuple(waited.most_common()),
        )


def _fewer(bands: Sequence[Band], size: int) -> Iterator[Band]:
    """`size` successive bands each as one."""
    for first in range(0, len(bands), size):
        part = bands[first : first + size]
        yield Band(part[0].begin_s, max(band.end_s for band in part))


def pieces(span: StepSpan, me: str) -> list[TimelinePiece]:
    """The waits in a step of the worker `me`. The rest of the step is computing."""
    rest_s = max(0.0, span.wait_s - sum(seconds for _, seconds in span.waited_for))
    named = [pair for pair in (*span.waited_for, (REST, rest_s)) if pair[1] > 0]
    if span.count > 1:
        length_s = span.end_s - span.begin_s
        if length_s <= 0:
            return []
        edges = list(itertools.accumulate((seconds / length_s for _, seconds in named), initial=0.0))
        return [
            TimelinePiece(span.begin_s, span.end_s, top, min(1.0, bottom), name)
            for (name, _), top, bottom in zip(named, edges, edges[1:], strict=False)
        ]
    gaps = [(span.begin_s, span.compute_at_s), (span.compute_at_s + span.compute_s, span.end_s)]
    own = [pair for pair in named if pair[0] == me]
    others = [pair for pair in named if pair[0] != me]
    return [
        *_fill(gaps[1:], own),
        *_fill([gaps[0], (gaps[1][0] + sum(s for _, s in own), gaps[1][1])], others),
    ]


def _fill(gaps: Sequence[tuple[float, float]], named: Sequence[tuple[str, float]]) -> Iterator[TimelinePiece]:
    """Fills gaps with waits, one after the other."""
    left = [pair for pair in gaps if pair[0] < pair[1]]
    for name, needed_s in named:
        while needed_s > 0 and left:
            begin, end = left[0]
            taken_s = min(needed_s, end - begin)
            yield TimelinePiece(begin, begin + taken_s, 0.0, 1.0, name)
            needed_s -= taken_s
            left[0] = (begin + taken_s, end)
            if left[0][0] >= end:
                left.pop(0)
