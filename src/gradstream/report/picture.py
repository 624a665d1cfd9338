"""A chart of the report as a picture of its own: an SVG file that follows the reader's choice of light or dark."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources

from gradstream.report.charts import HEIGHT, WIDTH

KEYS = 16
"""Height of the line below the chart that says what its colours mean."""

EDGE = 8
"""Room at the left and right of that line."""

SMALL = "text { font: 7px system-ui, sans-serif; fill: var(--quiet) } .line { stroke-width: 1 }"


MARK, GAP, CHARACTER = 12, 4, 3.6
"""Width of the mark of a key, of the gaps beside it, and of a character of its text."""


def legend(keys: Mapping[str, str]) -> list[str]:
    """The marks and texts of the line, none over another.

    Readers have fonts of different widths, so each text is set to a width of its own, which its number of letters says.
    """
    letters = sum(map(len, keys.values()))
    room = WIDTH - 2 * EDGE - len(keys) * (MARK + 2 * GAP)
    each = min(CHARACTER, room / max(1, letters))
    parts, x, y = list[str](), float(EDGE), HEIGHT + 5
    for style, text in keys.items():
        long = each * len(text)
        parts.append(f'<line class="line {style}" x1="{x:g}" y1="{y}" x2="{x + MARK:g}" y2="{y}"/>')
        parts.append(
            f'<text x="{x + MARK + GAP:g}" y="{y + 2.5}" textLength="{long:.4g}" lengthAdjust="spacingAndGlyphs">'
            f"{escape(text)}</text>"
        )
        x = round(x + MARK + 2 * GAP + long, 1)
    return parts


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
    parts = [chart, *legend(keys)]
    wide, high, style = WIDTH, HEIGHT + KEYS, "\n".join([colours, *drawn, SMALL])
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" '
        f'aria-label="{escape(told)}">\n<style>\n{style}\n</style>\n'
        f'<rect width="{wide}" height="{high}" rx="4" style="fill:var(--card)"/>\n{body}\n</svg>\n'
    )
