"""A chart of the report as a picture of its own: an SVG file that follows the reader's choice of light or dark."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources

from gradstream.report.charts import HEIGHT, LEFT, WIDTH

KEYS = 16
"""Height of the line below the chart that says what its colours mean."""

SMALL = "text { font: 7px system-ui, sans-serif; fill: var(--quiet) } .line { stroke-width: 1 }"


def picture(chart: str, keys: Mapping[str, str], told: str) -> str:
    """The text of the file.

    Args:
        chart: as `charts.line_chart` makes it.
        keys: by style of the chart, what it stands for.
        told: description of the picture for screen readers.
    """
    css = resources.files("gradstream.report").joinpath("page.css").read_text()
    colours, _, rest = css.partition("* {")
    drawn = [line for line in rest.splitlines() if line.startswith((".grid", ".line", ".c0"))]
    each, parts = (WIDTH - LEFT) / max(1, len(keys)), [chart]
    for at, (style, text) in enumerate(keys.items()):
        x, y = LEFT + each * at, HEIGHT + 5
        parts.append(f'<line class="line {style}" x1="{x:g}" y1="{y}" x2="{x + 12:g}" y2="{y}"/>')
        parts.append(f'<text x="{x + 16:g}" y="{y + 2.5}">{escape(text)}</text>')
    wide, high, style = WIDTH, HEIGHT + KEYS, "\n".join([colours, *drawn, SMALL])
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" '
        f'aria-label="{escape(told)}">\n<style>\n{style}\n</style>\n'
        f'<rect width="{wide}" height="{high}" rx="4" style="fill:var(--card)"/>\n{body}\n</svg>\n'
    )
