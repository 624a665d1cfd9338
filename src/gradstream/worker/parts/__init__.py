"""A replica of several processes: each holds a part of the model, and exchanges it with shards of its own.

    worker (part 0)                                   part 1, 2, ...
    its schedule, gate and reports, as ever
      `lead.py` ── turns: which minibatch is next ──▶ `node.py`
      `pipelined.py` ◀── values and gradients ──────▶ `pipelined.py`     (the pipeline; see `channel.py`)
      its strategy, with its own shards               the same strategy, with its own shards

Every process runs the strategy on its own part. So no strategy knows of parts, and a part talks only to the shards
that hold its ranges.
"""

__all__ = ()
