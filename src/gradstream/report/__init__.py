"""A run made visible, from its events alone: figures, one reason, charts, a page, traces.

`figures`, `curves`, `timeline` and `reason` are pure functions over events; `charts` and `page` make
text of them; `trace` and `tensorboard` write what other programs read.
"""

__all__ = ()
