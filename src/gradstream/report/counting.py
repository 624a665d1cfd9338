"""Small functions over events that several figures share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from gradstream.telemetry.events import EventDict


def by_node(events: Iterable[EventDict]) -> defaultdict[str, list[EventDict]]:
    """The events of each node, in their order."""
    found: defaultdict[str, list[EventDict]] = defaultdict(list)
    for event in events:
        found[event["node"]].append(event)
    return found


def rank_order(name: str) -> tuple[str, int]:
    """Sort key for names of nodes; worker-10 comes after worker-9."""
    role, _, rank = name.rpartition("-")
    is_rank = rank.isascii() and rank.isdigit() and len(rank) < 10
    return (role, int(rank)) if is_rank else (name, 0)


def mean_of(values: Sequence[float]) -> float | None:
    """The mean of some values; None if there are none."""
    return math.fsum(values) / len(values) if values else None


def cpu_s_of(event: EventDict) -> float:
    """CPU seconds of a process so far, from its "cpu" event."""
    return float(event["user_s"] + event["system_s"])


def total_of(counter: Iterable[float]) -> float:
    """The total of a counter, from its readings in order of time. Each process of a resumed run begins again at 0."""
    total = last = 0.0
    for value in counter:
        total += value - last if value >= last else value
        last = value
    return total
