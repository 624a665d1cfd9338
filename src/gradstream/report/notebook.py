"""A run as HTML for a notebook: a small table and the curve of the loss, without a script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gradstream.report import curves
from gradstream.report.charts import Curve, line_chart
from gradstream.report.units import count_text
from gradstream.telemetry.events import EventDict

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
        events: events of the run.
    """
    table = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    drawn = [
        ("training", curves.training(events), False),
        ("held out", curves.evaluated(events, "loss"), True),
    ]
    lines = [
        Curve(name, [(point.samples, point.value) for point in points], f"c{index}", dots)
        for index, (name, points, dots) in enumerate(drawn)
        if points
    ]
    chart = line_chart(
        lines, title="loss over samples", x_label="loss over samples", x_text=count_text, may_log=True
    )
    return f'<div class="gradstream"><style>{STYLE}</style><table>{table}</table>{chart}</div>'
