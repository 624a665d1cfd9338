"""For whom workers waited in a group without servers, found by comparing their steps.

In a group no rank knows which one was last: clocks are not compared, and asking would cost time itself. But
rounds begin together, so a worker whose gradient ended later, counted from the begin of the step,
kept the others waiting by as much. The rest of the waiting is the exchange itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gradstream.telemetry.events import GROUP, EventDict

__all__ = ["attributed"]


def attributed(steps: Sequence[EventDict]) -> list[EventDict]:
    """The steps, with their waiting for the group charged to the slowest worker of the round as far as it is due to it.

    Args:
        steps: events "step", of a run without servers. Steps of another run are returned unchanged.
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
