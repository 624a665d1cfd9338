"""The timeline as HTML: one drawing of all lanes, which the script of the page can zoom."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from gradstream.report.charts import time_text
from gradstream.report.figures import RunFigures, figures_of
from gradstream.report.staleness import StalenessRow
from gradstream.report.summary import begin_s
from gradstream.telemetry.events import GROUP, EventDict

# ---- timeline ----------------------------------------------------------------------------
# The work of each worker over time, as rectangles: computing, waiting, pushing, fetching.
#
# A step has its gradient at the time when it was computed, and waits before and after it. How long a worker waited
# for each node is known; the order of the waits is a guess: sums come after the gradient, answers to a fetch before
# it. If there are more steps than a page can hold, successive steps are drawn as one, whose height is divided in
# proportion.

MAX_STEPS = 12_000
"""Most steps that are drawn one by one, over all workers."""
MAX_LANES = 64
REST = ""
"""Takes the place of a node's name for waiting that no node caused."""


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
    """The time of a push, a fetch, or an evaluation."""

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


@dataclass(frozen=True, slots=True)
class Timeline:
    """The work of all workers over time.

    Args:
        begin_s, end_s: the time shown.
        lanes: one for each worker, by rank.
        merged: largest number of steps drawn as one.
        num_hidden: number of workers that are not shown.
    """

    begin_s: float
    end_s: float
    lanes: tuple[TimelineLane, ...]
    merged: int
    num_hidden: int


def lanes_of(
    events: Iterable[EventDict], *, max_steps: int = MAX_STEPS, max_lanes: int = MAX_LANES
) -> Timeline:
    """The timeline of a run's workers.

    Args:
        max_steps: most rectangles of steps.
        max_lanes: most workers; those of the lowest ranks are shown.
    """
    steps: defaultdict[int, list[EventDict]] = defaultdict(list)
    bands: defaultdict[tuple[str, str], list[Band]] = defaultdict(list)
    for event in events:
        if event["event"] == "step":
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
    lanes = [
        TimelineLane(
            name,
            tuple(_merge(steps[rank], merged)),
            tuple(_fewer(bands[name, "push"], merged)),
            tuple(_fewer(bands[name, "fetch"], merged)),
            tuple(bands[name, "evaluation"]),
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
    """Merges each `size` successive bands into one."""
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


# ---- lanes -------------------------------------------------------------------------------

WIDTH = 100_000
"""Width of the drawing in its units, for any length of the run."""
LANE, STEP, BAND = 34, 20, 4
"""Heights: of a lane, of the steps in it, of each of the two bands below them."""
NUM_COLOURS = 5
MAX_LISTED = 4
"""Most nodes that the text of a step lists."""
NOTICED = 2e-3
"""A smaller share of the workers' time is drawn, but not in the legend."""

Styles = Mapping[str, str]
"""Class of a rectangle, by the node for which a worker waited."""


def styles_of(figures: RunFigures) -> dict[str, str]:
    """A class for each node: the workers that others wait for most have a colour each, shards share one."""
    waited = _waited_for(figures)
    names = [worker.name for worker in figures.workers]
    styles = {GROUP: "shard", **{shard.name: "shard" for shard in figures.shards}}
    ranked = sorted(names, key=lambda name: -waited[name])
    styles.update({name: f"wait{min(index, NUM_COLOURS - 1)}" for index, name in enumerate(ranked)})
    return {**styles, REST: "rest"}


def _waited_for(figures: RunFigures) -> Counter[str]:
    """Seconds for which other nodes waited for a node, by node."""
    waited: Counter[str] = Counter()
    for worker in figures.workers:
        waited.update({name: s for name, s in worker.waited_for.items() if name != worker.name})
    return waited


def keys(figures: RunFigures, styles: Styles) -> str:
    """The legend of the drawing."""
    least_s = NOTICED * sum(worker.total_s for worker in figures.workers)
    seen = {name for name, seconds in _waited_for(figures).items() if seconds >= least_s}
    workers = [name for name, style in styles.items() if name in seen and style.startswith("wait")]
    entries = [("compute", "computing gradients")]
    if any(worker.own_s for worker in figures.workers):
        entries.append(("own", "sums and local steps"))
    entries += [(styles[name], f"waiting for {name}") for name in workers[: NUM_COLOURS - 1]]
    if len(workers) >= NUM_COLOURS:
        last = workers[NUM_COLOURS - 1] if len(workers) == NUM_COLOURS else "other workers"
        entries.append((f"wait{NUM_COLOURS - 1}", f"waiting for {last}"))
    if any(styles.get(name) == "shard" for name in seen):
        node = "the exchange with the other workers" if GROUP in seen else "the parameter server"
        entries.append(("shard", f"waiting for {node}"))
    entries.append(("rest", "waiting, nobody named"))
    if any(worker.evaluate_s for worker in figures.workers):
        entries.append(("evaluate", "evaluating"))
    return "".join(f'<span><i class="{style}"></i>{escape(text)}</span>' for style, text in entries)


def timeline_html(timeline: Timeline, styles: Styles) -> str:
    """The names, lanes, times and buttons of a timeline; "" for a run without steps."""
    seconds = timeline.end_s - timeline.begin_s
    if not timeline.lanes or seconds <= 0:
        return ""
    scale = WIDTH / seconds
    height = LANE * len(timeline.lanes)
    drawn = "".join(
        lane_paths(lane, index * LANE, timeline.begin_s, scale, styles)
        for index, lane in enumerate(timeline.lanes)
    )
    names = "".join(f"<div>{escape(lane.name)}</div>" for lane in timeline.lanes)
    marks = "".join(
        f'<span style="left:{25 * index}%">{time_text(seconds * index / 4) if index else "0 s"}</span>'
        for index in range(5)
    )
    data = {"seconds": seconds, "lanes": [_data(lane, timeline.begin_s) for lane in timeline.lanes]}
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div class="timeline"><div class="names" aria-hidden="true">{names}</div>'
        '<div class="lanes" tabindex="0" role="application" aria-label="Timeline of the workers. Plus '
        'and minus zoom, arrow keys move, 0 shows all.">'
        f'<svg viewBox="0 0 {WIDTH} {height}" height="{height}" preserveAspectRatio="none" role="img" '
        f'aria-label="Computing and waiting of each worker over {time_text(seconds)}">{drawn}</svg></div>'
        f'<div class="times">{marks}</div>'
        f'<script type="application/json">{embedded}</script></div>'
        '<div class="tools">'
        '<button value="+">zoom in</button><button value="-">zoom out</button>'
        '<button value="ArrowLeft">earlier</button><button value="ArrowRight">later</button>'
        '<button value="0">all</button><output></output></div>'
    )


def lane_paths(lane: TimelineLane, top: int, origin_s: float, scale: float, styles: Styles) -> str:
    """The rectangles of one worker as SVG paths, one path for each class.

    Waits are drawn over computing, so that colours mix correctly where a pixel holds many steps.

    Args:
        lane: the worker.
        top: upper edge of its lane, in units of the drawing.
        origin_s: time at the left edge.
        scale: units of the drawing per second.
        styles: class of each node for which a worker waited.
    """
    paths: defaultdict[str, list[str]] = defaultdict(list)

    def rectangle(style: str, begin_s: float, end_s: float, y: float, high: float) -> None:
        x, wide = (begin_s - origin_s) * scale, (end_s - begin_s) * scale
        paths[style].append(f"M{x:.1f} {y:g}h{wide:.1f}v{high:.4g}h{-wide:.1f}z")

    for span in lane.steps:
        rectangle("compute", span.begin_s, span.end_s, top, STEP)
    for span in lane.steps:
        for piece in pieces(_by_style(span, lane.name, styles), "own"):
            y = round(top + STEP * piece.top, 3)
            rectangle(piece.name or "rest", piece.begin_s, piece.end_s, y, STEP * (piece.bottom - piece.top))
    for band in lane.evaluations:
        rectangle("evaluate", band.begin_s, band.end_s, top, STEP)
    bands: tuple[tuple[str, tuple[Band, ...], int], ...] = (
        ("push", lane.pushes, STEP + 1),
        ("fetch", lane.fetches, STEP + 1 + BAND + 1),
    )
    for style, transfers, below in bands:
        for band in transfers:
            rectangle(style, max(origin_s, band.begin_s), band.end_s, top + below, BAND)
    return "".join(f'<path class="{style}" d="{"".join(d)}"/>' for style, d in paths.items())


def _by_style(span: StepSpan, me: str, styles: Styles) -> StepSpan:
    """The same step with styles instead of names, which needs fewer rectangles."""
    waited: defaultdict[str, float] = defaultdict(float)
    for name, seconds in span.waited_for:
        waited["own" if name == me else styles.get(name, "rest")] += seconds
    return dataclasses.replace(span, waited_for=tuple(waited.items()))


def _data(lane: TimelineLane, origin_s: float) -> dict[str, object]:
    steps = [
        [
            round(span.begin_s - origin_s, 6),
            round(span.end_s - origin_s, 6),
            span.step,
            span.count,
            round(span.compute_s, 6),
            [[name, round(seconds, 6)] for name, seconds in span.waited_for[:MAX_LISTED]],
        ]
        for span in lane.steps
    ]
    return {"name": lane.name, "steps": steps}


# ---- timeline ----------------------------------------------------------------------------
# A run as a Chrome trace: a JSON file that Perfetto (ui.perfetto.dev) and chrome://tracing load.
#
# Each node is a process. A worker has the tracks compute, wait (with the name of the node that it waits for), push,
# fetch and evaluate. A shard has the track apply, where each slice is its arithmetic since its previous report. CPU,
# memory and staleness are counters. Times are microseconds since the beginning of training.
#
# Reference: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

TRACKS = ("compute", "wait", "push", "fetch", "evaluate", "apply")
EVERY = 1 << 62
"""No limit: a trace viewer copes with any number of steps."""

Slice = dict[str, Any]

Pids = defaultdict[str, int]
"""Number of the process of each node, by its name."""


def trace_json(events: Sequence[EventDict]) -> str:
    """The trace of a run as the text of a file."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace_events(events))
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def trace_events(events: Sequence[EventDict]) -> Iterator[Slice]:
    """The records of the Chrome trace: metadata, slices, counters, instants."""
    figures = figures_of(events)
    pids: Pids = defaultdict(itertools.count(1).__next__)
    for node in figures.nodes:
        name, pid = node.name, pids[node.name]
        yield _named("process_name", pid, 0, name)
        role = name.partition("-")[0]
        tracks = {"worker": TRACKS[:-1], "shard": TRACKS[-1:]}.get(role, ())
        for track in tracks:
            yield _named("thread_name", pid, TRACKS.index(track), track)
    yield from _steps(events, pids)
    yield from _transfers(events, pids)
    yield from _applies(events, pids)
    yield from _stale(events, pids)
    for node in figures.nodes:
        for what, series in (("cores in use", node.cpu), ("own memory, bytes", node.memory)):
            for time_s, value in series:
                yield _counter(pids[node.name], what, time_s, {"": value})
    for moment in figures.story:
        text = f"{moment.kind}: {moment.text}"
        yield {"ph": "i", "s": "g", "name": text, "pid": 0, "tid": 0, "ts": _us(moment.time_s)}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _named(kind: str, pid: int, tid: int, name: str) -> Slice:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _counter(pid: int, name: str, time_s: float, values: dict[str, float]) -> Slice:
    return {"ph": "C", "name": name, "pid": pid, "ts": _us(time_s), "args": values}


def _slice(pid: int, track: str, name: str, begin_s: float, end_s: float, **args: Any) -> Slice:
    return {
        "ph": "X",
        "name": name,
        "cat": track,
        "pid": pid,
        "tid": TRACKS.index(track),
        "ts": _us(begin_s),
        "dur": _us(end_s - begin_s),
        "args": args,
    }


def _steps(events: Sequence[EventDict], pids: Pids) -> Iterator[Slice]:
    timeline = lanes_of(events, max_steps=EVERY, max_lanes=EVERY)
    for lane in timeline.lanes:
        for span in lane.steps:
            yield from _step(span, lane.name, pids[lane.name])
        for band in lane.evaluations:
            yield _slice(pids[lane.name], "evaluate", "held-out samples", band.begin_s, band.end_s)


def _step(span: StepSpan, me: str, pid: int) -> Iterator[Slice]:
    if span.compute_s > 0:
        end_s = span.compute_at_s + span.compute_s
        yield _slice(pid, "compute", "gradient", span.compute_at_s, end_s, step=span.step)
    for piece in pieces(span, me):
        if piece.name == me:
            yield _slice(pid, "compute", "sums and local step", piece.begin_s, piece.end_s, step=span.step)
        else:
            name = "waiting" if piece.name == REST else f"waiting for {piece.name}"
            yield _slice(pid, "wait", name, piece.begin_s, piece.end_s, step=span.step)


def _transfers(events: Iterable[EventDict], pids: Pids) -> Iterator[Slice]:
    for event in events:
        if event["event"] == "transfer":
            pid, kind, end_s = pids[event["node"]], event["kind"], event["time_s"]
            yield _slice(pid, kind, kind, end_s - event["seconds"], end_s, bytes=event["size_bytes"])


def _stale(events: Iterable[EventDict], pids: Pids) -> Iterator[Slice]:
    """A counter for each worker: mean and largest staleness since its previous report."""
    for event in events:
        if event["event"] == "exchange" and event["staleness"]:
            row = StalenessRow("", "", {int(tau): count for tau, count in event["staleness"].items()})
            values = {"mean": round(row.mean, 3), "largest": row.largest}
            yield _counter(pids[event["node"]], "staleness", event["time_s"], values)


def _applies(events: Iterable[EventDict], pids: Pids) -> Iterator[Slice]:
    """The updates of a shard between two reports, as one slice at the beginning of the interval."""
    since_s: dict[str, float] = {}
    done_s: dict[str, float] = {}
    updates: dict[str, int] = {}
    for event in events:
        node = event["node"]
        if event["event"] == "applied":
            updates[node] = event["updates"]
        elif event["event"] == "cpu" and node in updates:
            total_s = event["compute_s"].get("apply", 0.0)
            begin_s, spent_s = since_s.get(node, 0.0), total_s - done_s.get(node, 0.0)
            count = updates.pop(node)
            if spent_s > 0:
                end_s, name = begin_s + spent_s, f"{count} chunk updates"
                yield _slice(pids[node], "apply", name, begin_s, end_s, until_s=event["time_s"])
            since_s[node], done_s[node] = event["time_s"], total_s
