"""Finds for whom workers waited in a group without servers, by comparing their steps.

No rank of a group knows which one came last, since their clocks differ and a message would cost time. But all begin a
round together. So a worker whose gradient ended later, counted from the begin of its step, kept the others waiting for
the difference. They waited for the exchange the rest of the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gradstream.telemetry.events import GROUP, EventDict


def attributed(steps: Sequence[EventDict]) -> list[EventDict]:
    """The steps, with the part of their waiting that the slowest worker of the round caused under its name.

    Args:
        steps: "step" events. Steps of a run with servers are returned unchanged.
    """
    rounds: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for step in steps:
        rounds[step["step"]][step["node"]] = step.get("compute_at_s", 0.0) + step["compute_s"]
    return [_attributed(step, rounds[step["step"]]) for step in steps]


def _attributed(step: EventDict, ends: Mapping[str, float]) -> EventDict:
    waited = dict(step.get("waited_for", {}))
    if GROUP not in waited:
        return step
    slowest = max(ends, key=lambda name: (ends[name], name))
    late_s = min(waited[GROUP], ends[slowest] - ends[step["node"]])
    if late_s > 0:
        waited[slowest] = waited.get(slowest, 0.0) + late_s
        waited[GROUP] -= late_s
    return {**step, "waited_for": waited}
