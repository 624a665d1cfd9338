"""A run as a Chrome trace: a JSON file that Perfetto (ui.perfetto.dev) and chrome://tracing load.

Each node is a process. A worker has the tracks compute, wait (with the name of the node that it waits for), push,
fetch and evaluate. A shard has the track apply, where each slice is its arithmetic since its previous report. CPU,
memory and staleness are counters. Times are microseconds since the beginning of training.

Reference: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gradstream.report.figures import figures_of
from gradstream.report.lanes import REST, StepSpan, lanes_of, pieces
from gradstream.report.staleness import StalenessRow
from gradstream.telemetry.events import EventDict

# ---- timeline ----------------------------------------------------------------------------

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
