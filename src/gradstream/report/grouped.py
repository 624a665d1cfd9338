"""For whom workers waited in a group without servers: told by their steps, seen side by side.

In a group nobody can tell who was last: clocks are not compared, and asking would cost what it measures. But
rounds begin together, so a worker whose gradient ended later, counted from the begin of the step,
kept the others waiting by as much. What is left of the waiting is the exchange itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gradstream.telemetry.events import GROUP, EventDict

__all__ = ["attributed"]


def attributed(steps: Sequence[EventDict]) -> list[EventDict]:
    """Steps whose waiting for the group is due to the slowest worker of their round, as far as it is.

    Args:
        steps: events "step", of a run without servers or of another: those are left as they are.
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
