"""When a strategy paused which workers, which are then neither slow nor lost nor idle; changes of a run in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gradstream.telemetry.events import EventDict


def pauses_of(changes: Sequence[EventDict], end_s: float) -> Mapping[str, list[tuple[float, float]]]:
    """The intervals in which each worker was paused, by name, in seconds.

    Args:
        changes: "participation" events, in the order of time.
        end_s: end of the run.
    """
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    ends = [*(event["time_s"] for event in changes[1:]), end_s]
    for event, until_s in zip(changes, ends, strict=False):
        begin_s = event["time_s"]
        for name in event["paused"]:
            if until_s <= begin_s:
                continue
            continues = found[name] and found[name][-1][1] == begin_s
            found[name].append((found[name].pop()[0] if continues else begin_s, until_s))
    return found


def participation_text(event: EventDict) -> str:
    """A "participation" event in words: "alone: worker-0 takes part, 3 workers are paused"."""
    active, paused = event["active"], event["paused"]
    who = active[0] if len(active) == 1 else f"{len(active)} workers" if active else "nobody"
    parts = [f"{who} take{'s' if len(active) < 2 else ''} part"]
    if paused:
        other = paused[0] if len(paused) == 1 else f"{len(paused)} workers"
        parts.append(f"{other} {'is' if len(paused) == 1 else 'are'} paused")
    phase = f"{event['phase']}: " if event["phase"] else ""
    return phase + ", ".join(parts)


def relay_text(event: EventDict) -> str:
    """A "relay" event in words; "" for one that only counts bytes."""
    if event["size_bytes"]:
        return ""
    pair = f"{event['caller']} cannot dial {event['called']}"
    if event["how"] == "relayed":
        return f"{pair}, nor the other way round: their traffic goes through the coordinator's machine"
    return f"{pair}, which has dialled back"


def alone_text(events: Sequence[EventDict]) -> str:
    """Events "alone" of one partner in words: "worker-0, worker-3 went through 3 rounds without worker-1, ..."."""
    who = ", ".join(sorted({f"worker-{event['rank']}" for event in events}))
    rounds = f"{len(events):,} round{'s' * (len(events) > 1)}"
    first = events[0]
    return f"{who} went through {rounds} without {first['partner']}, first round {first['round']}: {first['reason']}"


def phase_text(event: EventDict) -> str:
    """A "phase" event in words: "phase 2 of 3, fast: downpour, 4 workers, minibatches of 32"."""
    sizes = sorted(set(event["batch_size"]))
    size = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}" if sizes else "?"
    joined = f", {event['accumulate']:,} for each step" if event["accumulate"] > 1 else ""
    workers = f"{event['workers']:,} worker{'s' * (event['workers'] > 1)}"
    name = f"phase {event['number']} of {event['phases']}, {event['label']}"
    why = f"; {event['why']}" if event.get("why") else ""
    return f"{name}: {event['strategy']}, {workers}, minibatches of {size}{joined}{why}"
