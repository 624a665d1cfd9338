"""Charts as SVG text. Colours are classes, for which the page has values in light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

# ---- units -------------------------------------------------------------------------------
# Figures as text, with their units.


def size_text(size_bytes: float) -> str:
    """A size as text, in powers of 1000: 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def time_text(seconds: float) -> str:
    """A duration as text: 420 µs, 3.1 ms, 2.50 s, 12 min 5 s, 3 h 20 min."""
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def count_text(count: float) -> str:
    """A count as text: 950, 12.3k, 4.5M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(count) >= limit:
            return f"{count / (1000 if unit == 'k' else limit):.3g}{unit}"
    return f"{count:,.4g}"


def value_text(value: float) -> str:
    """A number as text, of four digits: 0.01234, 1,234."""
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


# ---- charts ------------------------------------------------------------------------------

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 380, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 34
LOG_FROM = 100


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line. `dots` shows its points, for a figure that is measured rarely."""

    name: str
    points: Points
    style: str
    dots: bool = False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5) if m * power >= rough * 0.999), 10 * power)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    curves: Sequence[Curve],
    *,
    title: str,
    x_label: str,
    x_text: Callable[[float], str] = value_text,
    y_text: Callable[[float], str] = value_text,
    from_zero: bool = False,
    may_log: bool = False,
    marks: Iterable[tuple[float, str, str]] = (),
) -> str:
    """A chart of lines; "" if there is no point to draw.

    Args:
        curves: the lines, the most important one first.
        title: description of the chart for screen readers.
        x_label: text under the horizontal axis.
        x_text, y_text: return a value on the axis as text.
        x_text, y_text: format a value on the axis as text.
        from_zero: whether the vertical axis begins at 0.
        may_log: whether the vertical axis is logarithmic if the values span more than two powers of ten.
    """
    points = [point for curve in curves for point in curve.points if math.isfinite(point[1])]
    if not points:
        return ""
    axes = _Axes.of(points, from_zero=from_zero, may_log=may_log)
    parts = []
    for value in axes.y_ticks():
        y = axes.up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(y_text(value))}</text>')
    below = HEIGHT - BOTTOM
    for value in ticks(0, axes.x_high, 4):
        x = axes.across(value)
        anchor = "end" if x > WIDTH - RIGHT - 12 else "middle"
        parts.append(
            f'<text x="{x:.1f}" y="{below + 15}" text-anchor="{anchor}">{escape(x_text(value))}</text>'
        )
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{below}" x2="{WIDTH - RIGHT}" y2="{below}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    for x, style, text in marks:
        at = f'x1="{axes.across(x):.1f}" y1="{TOP}" x2="{axes.across(x):.1f}" y2="{below}"'
        parts.append(f'<line class="line {style}" {at}><title>{escape(text)}</title></line>')
    for curve in reversed(curves):
        parts += _curve(curve, axes)
    return _svg(parts, WIDTH, HEIGHT, title)


@dataclass(frozen=True, slots=True)
class _Axes:
    """Maps values to places in the drawing. If `log`, `y_low` and `y_high` are exponents of ten."""

    x_high: float
    y_low: float
    y_high: float
    log: bool

    @classmethod
    def of(cls, points: Points, *, from_zero: bool, may_log: bool) -> _Axes:
        values = [y for _, y in points]
        log = may_log and min(values) > 0 and max(values) > LOG_FROM * min(values)
        y_low, y_high = _range([math.log10(y) if log else y for y in values], from_zero=from_zero)
        return cls(max(x for x, _ in points) or 1.0, y_low, y_high, log)

    def across(self, x: float) -> float:
        return LEFT + x / self.x_high * (WIDTH - RIGHT - LEFT)

    def up(self, y: float) -> float:
        share = ((math.log10(y) if self.log else y) - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def y_ticks(self) -> list[float]:
        marks = ticks(self.y_low, self.y_high, 4)
        return [10**mark for mark in marks if mark == round(mark)] if self.log else marks


def _range(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    """The range of the vertical axis, a little wider than that of the values."""
    low, high = min(values), max(values)
    if from_zero:
        low = min(0.0, low)
    if high <= low:
        pad = abs(high) * 0.1 or 1.0
        return (low if from_zero and low == 0 else low - pad), high + pad
    pad = (high - low) * 0.04
    return (low if from_zero else low - pad), high + pad


def _curve(curve: Curve, axes: _Axes) -> list[str]:
    places = [(axes.across(x), axes.up(y)) for x, y in curve.points if math.isfinite(y)]
    if not places:
        return []
    parts = []
    if len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line {curve.style}" points="{path}"/>')
    if curve.dots or len(places) == 1:
        shown = places if len(places) <= 60 else places[-1:]
        parts += [f'<circle class="dot {curve.style}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in shown]
    return parts


def sparkline(points: Points, *, title: str, style: str = "c0", width: int = 120, height: int = 24) -> str:
    """A small line without axes, from 0 to its largest value; "" for fewer than two points."""
    if len(points) < 2:
        return ""
    x_low, x_high = points[0][0], points[-1][0]
    y_high = max(y for _, y in points) or 1.0
    span = (x_high - x_low) or 1.0
    places = [
        (width * (x - x_low) / span, height - 1 - (height - 3) * y / y_high) for x, y in _thin(points, width)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    area = f"0,{height} {path} {width},{height}"
    return _svg(
        [
            f'<polygon class="area {style}" points="{area}"/>',
            f'<polyline class="line {style}" points="{path}"/>',
        ],
        width,
        height,
        title,
        kind="spark",
    )


def _thin(points: Points, count: int) -> Points:
    """At most about `count` of the points, evenly; the last one stays."""
    size = math.ceil(len(points) / count)
    return points if size == 1 else [*points[::size], points[-1]]


def histogram(counts: Mapping[int, int], *, title: str, max_bars: int = 20) -> str:
    """A bar for each whole number from 0 on, or for several neighbours if there are many; "" without counts."""
    if not counts:
        return ""
    size = max(1, math.ceil((max(counts) + 1) / max_bars))
    sums = [0] * ((max(counts) // size) + 1)
    for value, count in counts.items():
        sums[value // size] += count
    width, height = 8 * max(len(sums), 4), 34
    high = max(sums)
    parts = []
    for index, count in enumerate(sums):
        if count:
            tall = max(1.0, (height - 2) * count / max(high, 1))
            label = f"{index}" if size == 1 else f"{index * size} to {index * size + size - 1}"
            parts.append(
                f'<rect class="fill c0" x="{8 * index}" y="{height - tall:.1f}" width="7" '
                f'height="{tall:.1f}">'
                f"<title>{label}: {count:,}</title></rect>"
            )
    parts.append(f'<line class="axis" x1="0" y1="{height}" x2="{width}" y2="{height}"/>')
    return _svg(parts, width, height, title, kind="spark")


def shares(parts: Iterable[tuple[str, float, str]], *, title: str) -> str:
    """One bar of 100 %, divided into parts (class, share, text)."""
    drawn, begin = [], 0.0
    for style, share, text in parts:
        drawn.append(
            f'<rect class="fill {style}" x="{200 * begin:.2f}" y="0" width="{200 * share:.2f}" height="14">'
            f"<title>{escape(text)}: {share:.1%}</title></rect>"
        )
        begin += share
    return _svg(drawn, 200, 14, title, kind="bar")


def _svg(parts: Iterable[str], width: float, height: float, title: str, kind: str = "chart") -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        f'role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


# ---- picture -----------------------------------------------------------------------------
# A chart of the report as a picture of its own: an SVG file that follows the reader's choice of light or dark.

KEYS = 16
"""Height of the legend below the chart."""

EDGE = 8
"""Space at the left and right of the legend."""

SMALL = "text { font: 7px system-ui, sans-serif; fill: var(--quiet) } .line { stroke-width: 1 }"


MARK, GAP, CHARACTER = 12, 4, 3.6
"""Width of a legend mark, of the gaps beside it, and of a character of its text."""


def legend(keys: Mapping[str, str]) -> list[str]:
    """The marks and texts of the legend, without overlaps.

    Readers have fonts of different widths, so each text is stretched to a fixed width, by its number of letters.
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


def picture(chart: str, keys: Mapping[str, str], title: str) -> str:
    """The text of an SVG file with a chart and its legend.

    Args:
        chart: as `charts.line_chart` makes it.
        keys: by style of the chart, what it stands for.
        title: description of the picture for screen readers.
    """
    css = resources.files("gradstream.report").joinpath("page.css").read_text()
    colours, _, rest = css.partition("* {")
    drawn = [line for line in rest.splitlines() if line.startswith((".grid", ".line", ".c0"))]
    parts = [chart, *legend(keys)]
    wide, high, style = WIDTH, HEIGHT + KEYS, "\n".join([colours, *drawn, SMALL])
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" '
        f'aria-label="{escape(title)}">\n<style>\n{style}\n</style>\n'
        f'<rect width="{wide}" height="{high}" rx="4" style="fill:var(--card)"/>\n{body}\n</svg>\n'
    )
