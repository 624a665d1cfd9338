"""Shows a run, from its events alone: its figures, the one reason why it is slow, charts, a page, a trace.

`figures`, `curves`, `timeline` and `reason` are pure functions over events. `charts` and `page` turn their results
into SVG and HTML. `trace` makes a file for trace viewers.
"""

__all__ = ()
