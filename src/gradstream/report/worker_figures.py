"""Figures of each worker of a run and of its machine, from its events."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradstream.telemetry.events import GROUP, EventDict

# ---- counting ----------------------------------------------------------------------------
# Small functions over events that several figures share.


def by_node(events: Iterable[EventDict]) -> defaultdict[str, list[EventDict]]:
    """The events of each node, in their order."""
    nodes: defaultdict[str, list[EventDict]] = defaultdict(list)
    for event in events:
        nodes[event["node"]].append(event)
    return nodes


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
    """The total of a counter, from its readings in order of time. Each process of a resumed run starts at 0 again."""
    total = last = 0.0
    for value in counter:
        total += value - last if value >= last else value
        last = value
    return total


# ---- worker figures ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker.

    Args:
        name: name of its node.
        steps, samples: numbers of its own steps and samples.
        compute_s: seconds in gradients.
        wait_s: seconds in the rest of its steps.
        waited_for: seconds of `wait_s` by node; its own name stands for sums and local steps.
        push_s, fetch_s: mean seconds of a push and of a fetch; None if none was reported.
        evaluate_s: seconds in evaluations on held-out samples, between steps.
        read_s: seconds of reading samples, in gradients or before them.
        cpu_s: CPU seconds of gradients; None if not measured.
        queued_s: seconds in which its arithmetic thread could run but had no core; None if not measured.
        load: mean number of threads on its machine that ran or waited for a core; None if not measured.
        cores: number of cores of its machine; None if unknown.
    """

    name: str
    steps: int
    samples: int
    compute_s: float
    wait_s: float
    waited_for: Mapping[str, float]
    push_s: float | None
    fetch_s: float | None
    evaluate_s: float = 0.0
    read_s: float = 0.0
    cpu_s: float | None = None
    queued_s: float | None = None
    load: float | None = None
    cores: int | None = None

    @property
    def total_s(self) -> float:
        """Seconds of all its steps."""
        return self.compute_s + self.wait_s

    @property
    def own_s(self) -> float:
        """Seconds of its arithmetic besides gradients."""
        return self.waited_for.get(self.name, 0.0)

    @property
    def lost_s(self) -> float:
        """Seconds of its gradients in which it neither computed nor read; 0 if not measured."""
        if self.cpu_s is None:
            return 0.0
        return max(0.0, self.compute_s - self.read_s - self.cpu_s)

    @property
    def compute_s_per_sample(self) -> float | None:
        """Seconds of gradients for each sample; None without samples."""
        return self.compute_s / self.samples if self.samples else None


def workers_of(by_kind: Mapping[str, Sequence[EventDict]]) -> tuple[WorkerFigures, ...]:
    """The figures of each worker, by rank.

    Args:
        by_kind: events by their name; the steps are `attributed`.
    """
    steps = by_node(by_kind["step"])
    durations: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for transfer in by_kind["transfer"]:
        durations[transfer["node"], transfer["kind"]].append(transfer["seconds"])
    cpu = by_node(by_kind["cpu"])
    evaluating: defaultdict[str, float] = defaultdict(float)
    for event in by_kind["evaluated"]:
        evaluating[event["node"]] += event.get("seconds", 0.0)
    workers = []
    for name in sorted(steps, key=rank_order):
        own = steps[name]
        waited: Counter[str] = Counter()
        for step in own:
            waited.update(step.get("waited_for", {}))
        workers.append(
            WorkerFigures(
                name=name,
                steps=len(own),
                samples=sum(step["samples"] for step in own),
                compute_s=math.fsum(step["compute_s"] for step in own),
                wait_s=math.fsum(step["wait_s"] for step in own),
                waited_for=dict(waited.most_common()),
                push_s=mean_of(durations[name, "push"]),
                fetch_s=mean_of(durations[name, "fetch"]),
                evaluate_s=evaluating[name],
                read_s=math.fsum(step.get("read_s", 0.0) for step in own),
                **_machine(cpu[name]),
            )
        )
    return tuple(workers)


def _machine(events: Sequence[EventDict]) -> dict[str, Any]:
    """The fields of `WorkerFigures` on the arithmetic and the machine of a worker, from its "cpu" events.

    A user's training loop computes on its own thread, which is not measured. Its gradients then took at most the CPU
    seconds of the process, minus those of other work.
    """
    cpu_s = total_of(event["compute_s"].get("gradient", 0.0) for event in events)
    queued_s = [event["queued_s"] for event in events if event.get("queued_s") is not None]
    if not cpu_s:
        other_s = total_of(math.fsum(event["compute_s"].values()) for event in events)
        cpu_s, queued_s = total_of(map(cpu_s_of, events)) - other_s, []
    load = [event["load"] for event in events if event.get("load") is not None]
    return {
        "cpu_s": cpu_s if events else None,
        "queued_s": total_of(queued_s) if queued_s else None,
        "load": mean_of(load),
        "cores": events[-1].get("cores") if events else None,
    }


# ---- texts -------------------------------------------------------------------------------
# Changes of a run in words.


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
    sizes = sorted(set(event["batch_size"]))  # none where loops make their minibatches themselves
    size = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}" if sizes else ""
    joined = f", {event['accumulate']:,} for each step" if event["accumulate"] > 1 else ""
    workers = f"{event['workers']:,} worker{'s' * (event['workers'] > 1)}"
    name = f"phase {event['number']} of {event['phases']}, {event['label']}"
    why = f"; {event['why']}" if event.get("why") else ""
    of = f", minibatches of {size}{joined}" if sizes else ""
    return f"{name}: {event['strategy']}, {workers}{of}{why}"


# ---- grouped -----------------------------------------------------------------------------
# For whom workers waited in a group without servers, found by comparing their steps.
#
# No rank of a group knows who came last, since clocks differ and a message would cost time. But all begin
# a round together. So a worker whose gradient ended later, counted from the beginning of its step, kept the others
# waiting for the difference. The rest of the time they waited for the exchange.


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
