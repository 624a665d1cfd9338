"""The report of a run as one self-contained HTML file, which needs no network and is complete without scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import resources
from typing import Any

from gradstream.report import sections
from gradstream.report.charts import time_text, value_text
from gradstream.report.figures import RunFigures, cost_of, figures_of
from gradstream.report.lanes import keys, lanes_of, styles_of, timeline_html
from gradstream.report.reason import Reason, reason_of
from gradstream.telemetry.events import EventDict
from gradstream.untrusted import escaped

# ---- page --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSource:
    """The input of a report.

    Args:
        title: name of the run.
        config: text of its `config.toml`; "" without one.
        info: contents of its `run.json`.
        price: price of a machine per hour, in any currency; None omits the cost.
    """

    events: Sequence[EventDict]
    title: str
    config: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    price: float | None = None

    @property
    def cores(self) -> int | None:
        """Number of cores of the machine; None if nodes ran on several machines, or if the run was simulated."""
        machine = self.info.get("machine")
        return None if machine is None or self.info.get("simulated") else machine.get("cores")


def page(source: PageSource) -> str:
    """The report as HTML."""
    source = replace(
        source,
        events=[_shown(event) for event in source.events],
        title=_shown(source.title),
        config=_shown(source.config),
        info=_shown(source.info),
    )
    figures = figures_of(source.events)
    cores = source.cores if len(figures.hosts) <= 1 else None
    reason = reason_of(figures, cores, processes=source.info.get("nodes") != "threads")
    styles = styles_of(figures)
    timeline = lanes_of(source.events)
    notes = []
    if timeline.merged > 1:
        notes.append(f"Up to {timeline.merged} successive steps are drawn as one, divided in proportion.")
    if timeline.num_hidden:
        notes.append(f"{timeline.num_hidden} more workers are not shown.")
    lanes = timeline_html(timeline, styles)
    parts = [
        _header(source, figures),
        _reason(reason),
        sections.learning(source.events),
        sections.section(
            "Timeline",
            lanes
            and f'<figure><figcaption>The workers over time<div class="keys">{keys(figures, styles)}'
            '<span><i class="push"></i>push under way</span><span><i class="fetch"></i>fetch under way</span>'
            f"</div></figcaption>{lanes}</figure>"
            f'<p class="note">{" ".join(notes)}</p>',
        ),
        _drawn("Workers", lambda: sections.workers(figures, styles)),
        _drawn("Shares", lambda: sections.uneven(source.events)),
        _drawn("Staleness", lambda: sections.staleness(figures)),
        _drawn("Links", lambda: sections.links(figures)),
        _drawn("Nodes", lambda: sections.nodes(figures)),
        _drawn("Story", lambda: sections.story(figures)),
        sections.configuration(source.config, source.info),
    ]
    style = resources.files("gradstream.report").joinpath("page.css").read_text()
    script = resources.files("gradstream.report").joinpath("page.js").read_text()
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(source.title)}: gradstream report</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(part for part in parts if part)}\n</main>\n<script>\n{script}</script>\n"
        "</body>\n</html>\n"
    )


def _shown(value: Any) -> Any:
    """The same value with its text escaped: browsers do not show control characters, but copy them."""
    if isinstance(value, str):
        return value if value.isprintable() else escaped(value, 10 * len(value) + 3, newlines=True)
    if isinstance(value, Mapping):
        return {_shown(key): _shown(entry) for key, entry in value.items()}
    return [_shown(entry) for entry in value] if isinstance(value, list | tuple) else value


def _drawn(title: str, draw: Callable[[], str]) -> str:
    """A section. If its events contradict one another, a note takes its place; the other sections are unaffected."""
    try:
        return draw()
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        text = escape(escaped(f"{type(error).__name__}: {error}", 256))
        return sections.section(title, f'<p class="note">The events of this run do not fit: {text}</p>')


def _header(source: PageSource, figures: RunFigures) -> str:
    s = figures.summary
    state = {
        "finished": '<span class="good">finished</span>',
        "failed": '<span class="bad">failed</span>',
        "stopped": "stopped, can be resumed",
        "unfinished": '<span class="bad">not finished</span>',
    }[figures.status]
    facts = [
        ("time", time_text(figures.seconds)),
        ("samples/s", s["samples_per_s"] and value_text(s["samples_per_s"])),
        ("loss, last epoch", s["loss"] is not None and value_text(s["loss"])),
        ("accuracy", s["accuracy"] is not None and f"{s['accuracy']:.2%}"),
        ("loss, held out", s["held_out_loss"] is not None and value_text(s["held_out_loss"])),
        ("samples", f"{s['samples']:,}"),
        ("steps", f"{s['steps']:,}"),
        ("staleness, mean", s["staleness_mean"] is not None and f"{s['staleness_mean']:.2f}"),
    ]
    if source.price is not None:
        cost, machines = cost_of(figures, source.price)
        facts.append((f"cost, {machines} machine{'s' if machines > 1 else ''}", f"{cost:,.4g}"))
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts if value
    )
    facts_of_job = [
        source.title,
        s["strategy"],
        s["optimizer"],
        s["workers"] and f"{s['workers']} workers",
        s["servers"] and f"{s['servers']} shard{'s' if s['servers'] > 1 else ''}",
        s["num_parameters"] and f"{s['num_parameters']:,} parameters",
        "simulated, times are virtual" if source.info.get("simulated") else None,
    ]
    failed = s["failed"] if figures.status == "failed" else None
    message = f'<p class="bad">{escape(failed["culprit"])}: {escape(failed["message"])}</p>' if failed else ""
    return (
        f"<header><h1>{escape(source.info.get('name') or source.title)}</h1>"
        f'<p class="quiet">{state} · {escape(" · ".join(str(fact) for fact in facts_of_job if fact))}</p>{message}'
        f'<dl class="facts">{shown}</dl></header>'
    )


def _reason(reason: Reason) -> str:
    if reason.kind == "nothing":
        return ""
    remedy = f"<p>{escape(reason.remedy)}</p>" if reason.remedy else ""
    return (
        f'<section class="reason" aria-label="Why is it slow?"><p><strong>Why is it slow?</strong> '
        f"{escape(reason.text)}</p>{remedy}</section>"
    )


# ---- notebook ----------------------------------------------------------------------------
# A run as HTML for a notebook: a small table and the loss curve, without a script.

STYLE = """
.gradstream { display: flex; flex-wrap: wrap; gap: 8px 28px; align-items: flex-start; }
.gradstream th { text-align: left; font-weight: 600; padding: 2px 16px 2px 0; }
.gradstream td { text-align: left; padding: 2px 0; }
.gradstream text { fill: currentColor; opacity: .65; font: 11px sans-serif; }
.gradstream .grid { stroke: currentColor; opacity: .15; }
.gradstream .axis { stroke: currentColor; opacity: .5; }
.gradstream .line { fill: none; stroke-width: 1.7; } .gradstream .dot { stroke: none; }
.gradstream .c0 { stroke: #4c8fd0; } .gradstream .dot.c0 { fill: #4c8fd0; }
.gradstream .c1 { stroke: #e07b39; } .gradstream .dot.c1 { fill: #e07b39; }
"""


def run_html(rows: Sequence[tuple[str, str]], events: Sequence[EventDict]) -> str:
    """A run as a piece of HTML.

    Args:
        rows: names and figures of the table.
    """
    events, rows = _shown(events), _shown(rows)
    table = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    chart = sections.loss_chart(events, "samples")
    return f'<div class="gradstream"><style>{STYLE}</style><table>{table}</table>{chart}</div>'
