"""A run made visible, from its events alone: figures, one reason, charts, a page, traces.

`figures`, `curves`, `timeline` and `reason` are pure functions over events; `charts` and `page` make
text of them; `trace` writes a file for other programs.
"""

__all__ = ()
