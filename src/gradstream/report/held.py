"""When a strategy's participation schedule paused which workers: neither slow nor dead, and not idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gradstream.report.summary import EventDict

__all__ = ["held_of", "turn_text"]


def held_of(turns: Sequence[EventDict], end_s: float) -> Mapping[str, list[tuple[float, float]]]:
    """The intervals in which each worker was paused, by name, in seconds.

    Args:
        turns: "participation" events, in the order of time.
        end_s: the end of the run.
    """
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    ends = [*(event["time_s"] for event in turns[1:]), end_s]
    for event, until_s in zip(turns, ends, strict=False):
        begin_s = event["time_s"]
        for name in event["paused"]:
            if until_s <= begin_s:
                continue
            goes_on = found[name] and found[name][-1][1] == begin_s
            found[name].append((found[name].pop()[0] if goes_on else begin_s, until_s))
    return found


def turn_text(event: EventDict) -> str:
    """A "participation" event in words: "alone: worker-0 takes part, 3 workers are paused"."""
    engaged, held = event["active"], event["paused"]
    who = engaged[0] if len(engaged) == 1 else f"{len(engaged)} workers" if engaged else "nobody"
    parts = [f"{who} take{'s' if len(engaged) < 2 else ''} part"]
    if held:
        other = held[0] if len(held) == 1 else f"{len(held)} workers"
        parts.append(f"{other} {'is' if len(held) == 1 else 'are'} paused")
    phase = f"{event['phase']}: " if event["phase"] else ""
    return phase + ", ".join(parts)
