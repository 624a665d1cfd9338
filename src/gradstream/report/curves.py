"""Loss, accuracy and throughput of a run over samples and over time, as few points for a chart."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradstream.report.summary import begin_s, noise_scale_of
from gradstream.telemetry.events import EventDict

MAX_POINTS = 200
"""Most points of a curve: more would lie closer together than the pixels of a page."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value after `samples` of all workers and `time_s` seconds."""

    samples: int
    time_s: float
    value: float


def training(events: Iterable[EventDict], key: str = "loss", max_points: int = MAX_POINTS) -> list[Point]:
    """A figure of the steps: means over equal numbers of successive minibatches, weighted by samples.

    A point lies at the end of the minibatches of its mean. Minibatches without the figure only count as samples.

    Args:
        key: "loss", "lr" or "gradient_norm".
        max_points: the most points of the curve.
    """
    steps = sorted((event for event in events if event["event"] == "step"), key=lambda e: e["time_s"])
    size = max(1, math.ceil(len(steps) / max_points))
    points, samples = [], 0
    for first in range(0, len(steps), size):
        part = steps[first : first + size]
        samples += sum(step["samples"] for step in part)
        known = [step for step in part if step.get(key) is not None and step["samples"]]
        weight = sum(step["samples"] for step in known)
        if weight:
            mean = math.fsum(step["samples"] * step[key] for step in known) / weight
            points.append(Point(samples, part[-1]["time_s"], mean))
    return points


def evaluated(events: Iterable[EventDict], key: str) -> list[Point]:
    """A figure of the evaluations on held-out samples: "accuracy", "loss", or the name of a metric."""
    points = []
    for event in events:
        if event["event"] == "evaluated":
            value = event[key] if key in ("accuracy", "loss") else (event.get("metrics") or {}).get(key)
            if value is not None:
                points.append(Point(event["samples"], event["time_s"], float(value)))
    return points


def noise_scale(events: Sequence[EventDict]) -> list[Point]:
    """The gradient noise scale after each measured round with a value; see `report.summary`."""
    steps = sorted((event["step"], event["samples"]) for event in events if event["event"] == "step")
    ends = list(itertools.accumulate((samples for _, samples in steps), initial=0))
    return [
        Point(ends[bisect_left(steps, (number, 0))], time_s, value)  # round r has the steps numbered r - 1
        for number, time_s, value in noise_scale_of(events)[2]
    ]


def logged(events: Iterable[EventDict], max_points: int = MAX_POINTS) -> dict[str, list[Point]]:
    """Figures that a user's loop has logged, by name: means of equal numbers of successive values.

    A mean is NaN if one of its values is not finite.
    """
    samples = 0
    curves: dict[str, list[Point]] = {}
    for event in sorted(events, key=lambda e: e["time_s"]):
        if event["event"] == "step":
            samples += event["samples"]
        elif event["event"] == "log":
            for name, value in event["values"].items():
                point = Point(samples, event["time_s"], math.nan if value is None else value)
                curves.setdefault(name, []).append(point)
    return {name: _thinned(points, max_points) for name, points in curves.items()}


def _thinned(points: Sequence[Point], max_points: int) -> list[Point]:
    size = max(1, math.ceil(len(points) / max_points))
    parts = [points[first : first + size] for first in range(0, len(points), size)]
    return [
        Point(part[-1].samples, part[-1].time_s, math.fsum(point.value for point in part) / len(part))
        for part in parts
    ]


def throughput(events: Iterable[EventDict], max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Throughput over time: (middle of an interval in seconds, samples per second of all workers in it).

    The samples of a step are spread over its duration. All intervals have the same length, at least that of the mean
    step.
    """
    steps = [event for event in events if event["event"] == "step"]
    if not steps:
        return []
    start, stop = begin_s(steps), max(step["time_s"] for step in steps)
    lengths = [step["compute_s"] + step["wait_s"] for step in steps]
    mean_s = math.fsum(lengths) / len(lengths)
    if stop <= start or mean_s <= 0:
        return []
    count = max(1, min(max_points, math.floor((stop - start) / mean_s)))
    return _spread(steps, lengths, start, (stop - start) / count, count)


def _spread(
    steps: Sequence[EventDict], lengths: Sequence[float], start: float, width_s: float, count: int
) -> list[tuple[float, float]]:
    """Adds to each interval the share of each step that lies in it."""
    totals = [0.0] * count
    for step, length_s in zip(steps, lengths, strict=True):
        end = (step["time_s"] - start) / width_s
        begin = max(0.0, end - length_s / width_s)
        if end <= begin:
            totals[min(count - 1, int(end))] += step["samples"]
            continue
        per_width = step["samples"] / (end - begin)
        for index in range(int(begin), min(count, math.ceil(end))):
            totals[index] += per_width * (min(end, index + 1) - max(begin, index))
    middles = itertools.count(start + width_s / 2, width_s)
    return [(middle, total / width_s) for middle, total in zip(middles, totals, strict=False)]
