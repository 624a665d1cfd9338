"""The sections of a report as HTML; a section without content is ""."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from gradstream.report import curves
from gradstream.report.charts import (
    Curve,
    count_text,
    histogram,
    line_chart,
    shares,
    size_text,
    sparkline,
    time_text,
    value_text,
)
from gradstream.report.figures import LinkFigures, RunFigures
from gradstream.report.lanes import Styles
from gradstream.report.staleness import MEMORY, StalenessRow, quorums, shares_table
from gradstream.report.worker_figures import WorkerFigures
from gradstream.telemetry.events import EventDict

TOGETHER_S = 0.1
"""Seconds after the beginning; a node that joins sooner counts as present from the beginning."""
MAX_CELLS = 64
"""Most cells of a table of workers by shards. A larger table is split into a table by worker and one by shard."""


def section(title: str, body: str) -> str:
    """A section with a heading; "" without a body."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n" if body else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table of HTML cells; "" without rows. A column whose head begins with ">" is aligned to the right."""
    if not rows:
        return ""
    right = [name.startswith(">") for name in head]
    names = "".join(
        f'<th scope="col"{" class=n" if to_right else ""}>{escape(name.removeprefix(">"))}</th>'
        for name, to_right in zip(head, right, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=n' if r else ''}>{c}</td>" for c, r in zip(row, right, strict=True))
        + "</tr>"
        for row in rows
    )
    note = f'<p class="note">{escape(caption)}</p>' if caption else ""
    return (
        f'{note}<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'
    )


# ---- learning ---------------------------------------------------------------------------


def learning(events: Sequence[EventDict]) -> str:
    """Loss, accuracy, metrics and logged figures over samples and over time, and the throughput."""
    training, held_out = curves.training(events), curves.evaluated(events, "loss")
    metrics = {name for e in events if e["event"] == "evaluated" for name in (e.get("metrics") or {})}
    figures = _over_both("loss", [("training", training, False), ("held out", held_out, True)])
    for name in ("accuracy", *sorted(metrics)):
        figures += _over_both(name, [("held out", curves.evaluated(events, name), True)])
    for name, values in curves.logged(events).items():
        curve = Curve(name, _points(values, "samples"), "c0", len(values) < 20)
        figures += _chart(
            name, "samples", [curve], f", as logged{_not_finite(values)}", may_log="loss" in name
        )
    for name, key in (("learning rate", "lr"), ("gradient norm", "gradient_norm")):
        points = _points(curves.training(events, key), "samples")
        if len({value for _, value in points}) > 1:
            figures += _chart(name, "samples", [Curve(name, points, "c3")])
    scales = curves.noise_scale(events)
    curve = Curve("noise scale", _points(scales, "samples"), "c3", len(scales) < 20)
    note = f", in samples; {value_text(scales[-1].value)} at the end" if scales else ""
    figures += _chart("gradient noise scale", "samples", [curve], note, may_log=True)
    rate = Curve("all workers", curves.throughput(events), "c2")
    figures += _chart("samples a second", "time", [rate], y_text=count_text, from_zero=True)
    if not figures:
        return ""
    evaluated = any(event["event"] == "evaluated" for event in events)
    note = "" if evaluated else '<p class="note">No evaluation on held-out samples on the way.</p>'
    return section("Learning", f'<div class="charts">{figures}</div>{note}')


def _not_finite(values: Sequence[curves.Point]) -> str:
    count = sum(not math.isfinite(point.value) for point in values)
    return f" ({count} of {len(values)} points not finite)" if count else ""


def _points(points: Sequence[curves.Point], axis: str) -> list[tuple[float, float]]:
    return [(point.samples if axis == "samples" else point.time_s, point.value) for point in points]


def _over_both(name: str, drawn: Sequence[tuple[str, Sequence[curves.Point], bool]]) -> str:
    charts = (_chart(name, axis, _lines(drawn, axis), may_log=name == "loss") for axis in ("samples", "time"))
    return "".join(charts)


def _lines(drawn: Sequence[tuple[str, Sequence[curves.Point], bool]], axis: str) -> list[Curve]:
    return [
        Curve(text, _points(points, axis), f"c{index}", dots)
        for index, (text, points, dots) in enumerate(drawn)
        if points
    ]


def loss_chart(events: Sequence[EventDict], axis: str) -> str:
    """The loss in training and on held-out samples, without a caption; "" without points."""
    training, held_out = curves.training(events), curves.evaluated(events, "loss")
    lines = _lines([("training", training, False), ("held out", held_out, True)], axis)
    title = f"loss over {axis}"
    return line_chart(lines, title=title, x_label=title, x_text=count_text, may_log=True)


def _chart(name: str, axis: str, lines: Sequence[Curve], note: str = "", **options: Any) -> str:
    """A chart of lines with its caption and, for several lines, a legend; "" without points."""
    title = f"{name} over {axis}"
    x_text = count_text if axis == "samples" else time_text
    chart = line_chart(lines, title=title, x_label=axis, x_text=x_text, **options)
    if not chart:
        return ""
    entries = "".join(f'<span><i class="{line.style}"></i>{escape(line.name)}</span>' for line in lines)
    legend = f'<div class="keys">{entries}</div>' if len(lines) > 1 else ""
    return f"<figure><figcaption>{escape(title + note)}{legend}</figcaption>{chart}</figure>"


# ---- workers ----------------------------------------------------------------------------


def workers(figures: RunFigures, styles: Styles) -> str:
    """A table of how each worker spent its time."""
    rows, seconds = [], figures.seconds or 1.0
    shards = {shard.name for shard in figures.shards}
    for worker in figures.workers:
        used_s = worker.total_s + worker.evaluate_s
        per_sample = worker.compute_s_per_sample
        rows.append(
            [
                escape(worker.name),
                f"{worker.steps:,}",
                f"{worker.samples:,}",
                time_text(per_sample) if per_sample is not None else "",
                shares(_parts(worker, styles), title=f"Where the time of {worker.name} went"),
                f"{worker.compute_s / worker.total_s:.0%}" if worker.total_s else "",
                f"{worker.evaluate_s / seconds:.0%}",
                f"{max(0.0, 1 - used_s / seconds):.0%}",
                escape(_waits(worker, shards)),
                ", ".join("–" if s is None else time_text(s) for s in (worker.push_s, worker.fetch_s)),
            ]
        )
    head = ["worker", ">steps", ">samples", ">per sample", "its steps", ">computing", ">evaluating"]
    head += [">idle", "waited for", ">a push, a fetch"]
    about = "Computing is a share of a worker's steps; evaluating and idle are shares of the run."
    return section("Workers", _table(head, rows, about))


def uneven(events: Sequence[EventDict]) -> str:
    """How speed divided the rounds, and which contributions came too late."""
    about = "Samples of a round by worker, as set by measured speed."
    head, rows = shares_table(events)
    text = section("Shares", _table(head, rows, about))
    about = "Gradients that came after the update of their round are late; a late worker skips rounds."
    head, rows = quorums(events)
    return text + section("Backup workers", _table(head, rows, about))


def _parts(worker: WorkerFigures, styles: Styles) -> list[tuple[str, float, str]]:
    total = worker.total_s or 1.0
    rest = max(0.0, worker.wait_s - math.fsum(worker.waited_for.values()))
    parts = [("compute", worker.compute_s / total, "gradients")]
    for name, seconds in worker.waited_for.items():
        own = name == worker.name
        what = "own sums and local steps" if own else f"waiting for {name}"
        parts.append(("own" if own else styles.get(name, "rest"), seconds / total, what))
    return [*parts, ("rest", rest / total, "waiting, nobody named")]


def _waits(worker: WorkerFigures, shards: set[str]) -> str:
    """The two workers for which a worker waited longest, and all shards together."""
    named = [(name, s) for name, s in worker.waited_for.items() if name != worker.name and name not in shards]
    served_s = math.fsum(s for name, s in worker.waited_for.items() if name in shards)
    shown = [
        (name, seconds / (worker.total_s or 1.0)) for name, seconds in [*named[:2], ("shards", served_s)]
    ]
    return ", ".join(f"{name} {share:.0%}" for name, share in shown if share >= 0.005)


# ---- staleness and links ----------------------------------------------------------------


def staleness(figures: RunFigures) -> str:
    """Histograms of staleness by worker and shard."""
    if figures.summary["group"] is not None:
        about = (
            "None: workers sum their gradients among themselves, and all continue from the same parameters."
        )
        return section("Staleness", f"<p>{about}</p>")
    links = figures.staleness
    if not links:
        return ""
    if all(tau == 0 for link in links for tau in link.histogram):
        return section(
            "Staleness", "<p>None: each gradient was applied to the version that it was computed on.</p>"
        )
    cells = {(link.worker, link.shard): link.histogram for link in links}
    names, shards = _sides(links)
    if len(cells) > MAX_CELLS:
        rows = [[escape(name), _stale(_sum(links, worker=name), name)] for name in names]
        rows += [[escape(name), _stale(_sum(links, shard=name), name)] for name in shards]
        rows.append(["all", _stale(_sum(links), "all")])
        return section("Staleness", _table(["by worker, then by shard", "chunks by staleness"], rows))
    rows = [
        [
            escape(name),
            *(_stale(cells.get((name, shard), {}), f"{name} at {shard}") for shard in shards),
            _stale(_sum(links, worker=name), f"{name} at all shards"),
        ]
        for name in names
    ]
    all_of = [_stale(_sum(links, shard=shard), f"all at {shard}") for shard in shards]
    rows.append(["all", *all_of, _stale(_sum(links), "all")])
    if shards == [MEMORY]:
        about = (
            "Minibatches of others that came into the shared vector during one of a worker's; "
            "bars count minibatches, from 0 on. Of 100 minibatches 99 had p99 or less."
        )
    else:
        about = (
            "Updates of a chunk since the version that a gradient was computed on; "
            "bars count chunks, from 0 on. Of 100 chunks 99 had p99 or less."
        )
    head = ["pushed by", *(f"at {shard}" for shard in shards), "at all"]
    return section("Staleness", _table(head, rows, about))


def _sides(links: Sequence[LinkFigures | StalenessRow]) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(e.worker for e in links)), list(dict.fromkeys(e.shard for e in links))


def _sum(links: Iterable[StalenessRow], *, worker: str = "", shard: str = "") -> Mapping[int, int]:
    total: Counter[int] = Counter()
    for link in links:
        if worker in ("", link.worker) and shard in ("", link.shard):
            total.update(link.histogram)
    return total


def _stale(counts: Mapping[int, int], title: str) -> str:
    row = StalenessRow("", "", counts)
    if not row.chunks:
        return ""
    return f'{histogram(counts, title=f"Staleness, {title}: {row}")}<span class="quiet">{row}</span>'


def links(figures: RunFigures) -> str:
    """Bytes between workers and shards, up and down."""
    names, shards = _sides(figures.links)
    shown = shards if len(figures.links) <= MAX_CELLS else []
    rows = []
    for name in [*names, "all"]:
        some = [link for link in figures.links if name in ("all", link.worker)]
        row = [_moved([link for link in some if link.shard == shard]) for shard in shown]
        rows.append([escape(name), *row, _moved(some), _rate(some, figures.seconds)])
    head = ["worker", *(f">{shard}" for shard in shown), ">all shards", ">mean rate"]
    about = "Bytes up (pushed, ↑) and down (fetched, ↓), retries included."
    summary = figures.summary
    up, down = (summary.get(f"whole_{direction}_bytes", 0) for direction in ("pushed", "fetched"))
    if up > summary.get("pushed_bytes", 0) or down > summary.get("fetched_bytes", 0):
        whole = f"{size_text(up)} ↑ {size_text(down)} ↓"
        about += f" Only changed rows were sent; whole chunks would have been {whole}."
    return section("Links", _table(head, rows, about) if figures.links else "")


def _bytes(links: Sequence[LinkFigures]) -> tuple[int, int]:
    return sum(link.pushed_bytes for link in links), sum(link.fetched_bytes for link in links)


def _moved(links: Sequence[LinkFigures]) -> str:
    up, down = _bytes(links)
    return f"{size_text(up)} ↑ {size_text(down)} ↓" if up or down else ""


def _rate(links: Sequence[LinkFigures], seconds: float) -> str:
    up, down = _bytes(links)
    return f"{size_text(up / seconds)}/s ↑ {size_text(down / seconds)}/s ↓" if seconds else ""


# ---- nodes ------------------------------------------------------------------------------


def nodes(figures: RunFigures) -> str:
    """CPU and memory of each process, and when it joined and left."""
    rows = []
    for node in figures.nodes:
        cores = max((value for _, value in node.cpu), default=0.0)
        left = _when(node.left_s)
        rows.append(
            [
                escape(node.name),
                escape(node.host),
                escape(", ".join(node.carriers)),
                _when(node.joined_s),
                f'<span class="bad">lost, {left}</span>' if node.lost else left,
                time_text(node.cpu_s),
                sparkline(node.cpu, title=f"Cores in use by {node.name}, largest {cores:.2f}", style="c0"),
                f"{cores:.2f}" if node.cpu else "",
                sparkline(node.memory, title=f"Memory of {node.name} over time", style="c3"),
                size_text(node.peak_bytes) if node.peak_bytes else "",
            ]
        )
    head = ["node", "host", "reaches others by", ">joined", ">left", ">CPU"]
    head += ["cores in use", ">most", "own memory", ">peak"]
    about = "Curves show the time of the run, from 0 up to the largest value, which stands beside them."
    return section("Nodes", _table(head, rows, about))


def story(figures: RunFigures) -> str:
    """The story of a run: nodes that joined late, were lost or failed, checkpoints, stops."""
    begin_s = max(figures.begin_s, TOGETHER_S)
    late = [moment for moment in figures.story if moment.kind == "joined" and moment.time_s > begin_s]
    others = [*late, *(moment for moment in figures.story if moment.kind not in ("joined", "left"))]
    together = [
        moment.text for moment in figures.story if moment.kind == "joined" and moment.time_s <= begin_s
    ]
    rows = [["0 s", "joined", escape(_few(together))]] if together else []
    for moment in sorted(others, key=lambda moment: moment.time_s):
        bad = moment.kind in ("lost", "failed", "insecure", "no checkpoint")
        kind = f'<span class="bad">{moment.kind}</span>' if bad else moment.kind
        rows.append([_when(moment.time_s), kind, f'<span class="text">{escape(moment.text)}</span>'])
    return section("What happened", _table([">when", "what", "who"], rows))


def _when(time_s: float | None) -> str:
    return "" if time_s is None else time_text(round(time_s, 3))


def _few(names: Sequence[str], most: int = 12) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def configuration(config: str, info: Mapping[str, Any]) -> str:
    """The settings of the run, and its machine."""
    parts = ""
    if config:
        parts += f"<details open><summary>config.toml</summary><pre>{escape(config)}</pre></details>"
    if info:
        text = json.dumps(info, indent=2, ensure_ascii=False)
        parts += f"<details open><summary>Machine and versions</summary><pre>{escape(text)}</pre></details>"
    return section("Configuration", parts)
