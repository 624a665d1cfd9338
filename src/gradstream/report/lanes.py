"""The timeline as HTML: one drawing of all lanes, which the script of the page can zoom."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from html import escape

from gradstream.report.figures import RunFigures
from gradstream.report.timeline import REST, Band, StepSpan, Timeline, TimelineLane, pieces
from gradstream.report.units import time_text
from gradstream.telemetry.events import GROUP

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
    found = {GROUP: "shard", **{shard.name: "shard" for shard in figures.shards}}
    ranked = sorted(names, key=lambda name: -waited[name])
    found.update({name: f"wait{min(index, NUM_COLOURS - 1)}" for index, name in enumerate(ranked)})
    return {**found, REST: "rest"}


def _waited_for(figures: RunFigures) -> Counter[str]:
    """Seconds for which other nodes waited, by the node that they waited for."""
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
    if any(worker.paused_s for worker in figures.workers):
        entries.append(("paused", "paused"))
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

    Waits are drawn over computing, so that their colours mix rightly where a pixel holds many steps.

    Args:
        lane: the worker.
        top: upper edge of its lane, in units of the drawing.
        origin_s: time at the left edge.
        scale: units of the drawing for each second.
        styles: class of each node for which a worker waited.
    """
    paths: defaultdict[str, list[str]] = defaultdict(list)

    def rectangle(style: str, begin_s: float, end_s: float, y: float, high: float) -> None:
        x, wide = (begin_s - origin_s) * scale, (end_s - begin_s) * scale
        paths[style].append(f"M{x:.1f} {y:g}h{wide:.1f}v{high:.4g}h{-wide:.1f}z")

    for band in lane.pauses:
        rectangle("paused", max(origin_s, band.begin_s), band.end_s, top, STEP)
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
    """The same step with styles instead of names, which takes fewer rectangles."""
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
