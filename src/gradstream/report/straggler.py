"""The one slow worker for which the others wait, if there is one."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypedDict

from gradstream.report.grouped import attributed
from gradstream.telemetry.events import EventDict

SLOWER = 1.5
NOTABLE = 0.1
"""A smaller share of the run is not mentioned."""


class Straggler(TypedDict):
    """A worker that is slower and keeps the others waiting.

    `slower`: the median worker computes so many times more samples in a second of its gradients. `waited_s`: seconds
    for which each of the others waited for it, in the mean: within their steps, and after their last step until the
    slow worker had made its last one.
    """

    who: str
    slower: float
    waited_s: float


def straggler_of(
    steps: Sequence[EventDict], train_s: float | None, absent: Collection[str] = ()
) -> Straggler | None:
    """The slowest worker, if it is 1.5 times slower and the others wait for it for a tenth of the run.

    Args:
        steps: "step" events.
        train_s: seconds of training; None if unknown.
        absent: names of workers that did not wait for the end because they were lost or paused.

    Returns:
        None if no worker is that slow, or if nobody waits for it, as with asynchronous strategies before the end.
    """
    samples: Counter[str] = Counter()
    computed_s: Counter[str] = Counter()
    ends_s: dict[str, float] = {}  # end of the last step; nobody waits for a gradient that is dropped
    for step in steps:
        if not step.get("late"):
            ends_s[step["node"]] = max(step["time_s"], ends_s.get(step["node"], 0.0))
        samples[step["node"]] += step["samples"]
        computed_s[step["node"]] += step["compute_s"]
    per_s = {who: samples[who] / computed_s[who] for who in samples if samples[who] and computed_s[who] > 0}
    if len(per_s) < 2 or not train_s:
        return None
    slowest = min(per_s, key=lambda who: per_s[who])
    others = [speed for who, speed in per_s.items() if who != slowest]
    slower = statistics.median(others) / per_s[slowest]
    waited = (
        step["waited_for"].get(slowest, 0.0)
        for step in attributed(steps)
        if step["node"] != slowest and "waited_for" in step
    )
    end_s = ends_s.get(slowest, 0.0)
    idle = (max(0.0, end_s - last_s) for who, last_s in ends_s.items() if who not in absent)
    waited_s = math.fsum([*waited, *idle]) / len(others)
    if slower < SLOWER or waited_s <= NOTABLE * train_s:
        return None
    return Straggler(who=slowest, slower=slower, waited_s=waited_s)


def straggler_text(straggler: Straggler | None) -> str:
    """A straggler in words: "worker-3 is 5.0 × slower; the others waited 12.0 s for it"; "" for none."""
    if straggler is None:
        return ""
    who, slower, waited_s = straggler["who"], straggler["slower"], straggler["waited_s"]
    return f"{who} is {slower:.1f} × slower; the others waited {waited_s:,.1f} s for it"
