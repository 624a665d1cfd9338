"""Figures as text, with their units."""

from __future__ import annotations


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
