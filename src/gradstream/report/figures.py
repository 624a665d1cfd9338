"""What became of each worker, shard, link and node of a run, as pure functions of its events.

Totals over the whole run are `gradstream.summary`'s; here they are by who.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradstream.report.grouped import attributed
from gradstream.report.held import held_of
from gradstream.report.staleness import StalenessRow, staleness_by
from gradstream.report.story import Moment, Status, status_of, story_of
from gradstream.summary import EventDict, begin_s, carriers_of, summary_of

__all__ = [
    "Figures",
    "LinkFigures",
    "NodeFigures",
    "ShardFigures",
    "WorkerFigures",
    "cost_of",
    "figures_of",
]

Series = tuple[tuple[float, float], ...]
"""(time_s, value), in the order of time."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker.

    Args:
        name: of its node.
        steps, samples: of its own.
        compute_s: in gradients.
        wait_s: in the rest of its steps.
        waited_for: seconds of `wait_s` by name; itself is its own sums and local steps.
        push_s, fetch_s: mean seconds of a push and of a fetch; None where none was reported.
        evaluate_s: between steps, looking at held-out samples.
        held_s: held back by the strategy's drive.
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
    held_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all of its steps."""
        return self.compute_s + self.wait_s

    @property
    def own_s(self) -> float:
        """Seconds of own arithmetic besides gradients."""
        return self.waited_for.get(self.name, 0.0)

    @property
    def compute_s_per_sample(self) -> float | None:
        """Seconds of a gradient for each sample; None without samples."""
        return self.compute_s / self.samples if self.samples else None


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """One shard. `apply_s` are seconds of arithmetic, `cpu_s` of its whole process."""

    name: str
    updates: int
    apply_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What passed between a worker and a shard."""

    worker: str
    shard: str
    pushed_bytes: int
    fetched_bytes: int


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """One process.

    Args:
        name, role: who it is.
        host: of its address; "" where the events do not tell.
        carriers: by which it reaches the others.
        joined_s, left_s: when it came and went; None where it did not, or is not told.
        lost: it went without a goodbye.
        cpu_s: CPU seconds, total.
        cpu: cores in use over time.
        memory: own resident bytes over time.
        peak_bytes: of own memory.
    """

    name: str
    role: str
    host: str
    carriers: tuple[str, ...]
    joined_s: float | None
    left_s: float | None
    lost: bool
    cpu_s: float
    cpu: Series
    memory: Series
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Figures:
    """A run by who. Tuples are in the order of ranks; times count from the begin of training.

    `imbalance_s` is how long workers would have waited for one another had only computing taken time:
    over all steps and workers, the longest gradient of that step minus its own. `late_s` is by how much
    each worker's contributions came after those of all others, at the shard where that was most.
    """

    summary: Mapping[str, Any]
    status: Status
    begin_s: float
    end_s: float
    workers: tuple[WorkerFigures, ...] = ()
    shards: tuple[ShardFigures, ...] = ()
    links: tuple[LinkFigures, ...] = ()
    nodes: tuple[NodeFigures, ...] = ()
    story: tuple[Moment, ...] = ()
    hosts: tuple[str, ...] = ()
    imbalance_s: float = 0.0
    late_s: Mapping[str, float] = field(default_factory=dict)
    staleness: tuple[StalenessRow, ...] = ()

    @property
    def seconds(self) -> float:
        """From the begin of the first step to the last thing known of training."""
        return max(0.0, self.end_s - self.begin_s)


def figures_of(events: Sequence[EventDict]) -> Figures:
    """All figures of a run by who. Of a run without steps most of them are empty."""
    by_kind: defaultdict[str, list[EventDict]] = defaultdict(list)
    for event in events:
        by_kind[event["event"]].append(event)
    nodes = _nodes(by_kind)
    steps = by_kind["step"] = attributed(by_kind["step"])
    end_s = max((event["time_s"] for event in (*steps, *by_kind["finished"])), default=0.0)
    held = held_of(by_kind["drive"], end_s)
    return Figures(
        summary=summary_of(events),
        status=status_of(events),
        begin_s=begin_s(steps),
        end_s=end_s,
        workers=_workers(steps, by_kind["transfer"], by_kind["evaluated"], held),
        shards=_shards(by_kind),
        links=_links(by_kind["link"]),
        nodes=nodes,
        story=story_of(by_kind),
        hosts=tuple(sorted({node.host for node in nodes if node.host})),
        imbalance_s=_imbalance_s(steps),
        late_s=_late_s(by_kind["applied"]),
        staleness=tuple(staleness_by(events)),
    )


def cost_of(figures: Figures, price_per_machine_hour: float) -> tuple[float, int]:
    """(cost, machines): every machine that hosted a node, from the begin of training to its end."""
    machines = max(1, len(figures.hosts))
    return price_per_machine_hour * machines * figures.end_s / 3600, machines


def _order(name: str) -> tuple[str, int]:
    """worker-10 comes after worker-9."""
    role, _, rank = name.rpartition("-")
    is_rank = rank.isascii() and rank.isdigit() and len(rank) < 10
    return (role, int(rank)) if is_rank else (name, 0)


def _workers(
    steps: Iterable[EventDict],
    transfers: Iterable[EventDict],
    evaluations: Iterable[EventDict],
    held: Mapping[str, Sequence[tuple[float, float]]],
) -> tuple[WorkerFigures, ...]:
    by_node: defaultdict[str, list[EventDict]] = defaultdict(list)
    for step in steps:
        by_node[step["node"]].append(step)
    durations: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for transfer in transfers:
        durations[transfer["node"], transfer["kind"]].append(transfer["seconds"])
    evaluating: defaultdict[str, float] = defaultdict(float)
    for event in evaluations:
        evaluating[event["node"]] += event.get("seconds", 0.0)
    found = []
    for name in sorted(by_node, key=_order):
        own = by_node[name]
        waited: Counter[str] = Counter()
        for step in own:
            waited.update(step.get("waited_for", {}))
        found.append(
            WorkerFigures(
                name=name,
                steps=len(own),
                samples=sum(step["samples"] for step in own),
                compute_s=math.fsum(step["compute_s"] for step in own),
                wait_s=math.fsum(step["wait_s"] for step in own),
                waited_for=dict(waited.most_common()),
                push_s=_mean(durations[name, "push"]),
                fetch_s=_mean(durations[name, "fetch"]),
                evaluate_s=evaluating[name],
                held_s=math.fsum(end_s - begin_s for begin_s, end_s in held.get(name, ())),
            )
        )
    return tuple(found)


def _imbalance_s(steps: Iterable[EventDict]) -> float:
    by_step: defaultdict[int, list[float]] = defaultdict(list)
    for step in steps:
        by_step[step["step"]].append(step["compute_s"])
    return math.fsum(max(computed) * len(computed) - math.fsum(computed) for computed in by_step.values())


def _late_s(events: Iterable[EventDict]) -> dict[str, float]:
    late: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by shard
    for event in events:
        late[event["node"]].update(event.get("late_s", {}))
    return {
        who: max(one[who] for one in late.values()) for who in {who for one in late.values() for who in one}
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _shards(by_kind: Mapping[str, Sequence[EventDict]]) -> tuple[ShardFigures, ...]:
    updates: Counter[str] = Counter()
    for event in by_kind["applied"]:
        updates[event["node"]] += event["updates"]
    cpu: defaultdict[str, list[EventDict]] = defaultdict(list)
    for event in by_kind["cpu"]:
        cpu[event["node"]].append(event)
    found = []
    joined = {event["who"]: 0 for event in by_kind["joined"] if event["who"].startswith("shard-")}
    for name in sorted({**joined, **updates}, key=_order):
        apply_s = _total(math.fsum(event["compute_s"].values()) for event in cpu[name])
        found.append(ShardFigures(name, updates[name], apply_s, _total(map(_cpu_s, cpu[name]))))
    return tuple(found)


def _cpu_s(event: EventDict) -> float:
    return float(event["user_s"] + event["system_s"])


def _total(counter: Iterable[float]) -> float:
    """What a counter has counted that begins at 0 again with each process of a resumed run."""
    total = last = 0.0
    for value in counter:
        total += value - last if value >= last else value
        last = value
    return total


def _links(events: Iterable[EventDict]) -> tuple[LinkFigures, ...]:
    pushed: Counter[tuple[str, str]] = Counter()
    fetched: Counter[tuple[str, str]] = Counter()
    for event in events:
        key = (event["node"], event["shard"])
        pushed[key] += event["pushed_bytes"]
        fetched[key] += event["fetched_bytes"]
    keys = sorted(pushed, key=lambda key: (_order(key[0]), _order(key[1])))
    return tuple(LinkFigures(*key, pushed[key], fetched[key]) for key in keys)


def _nodes(by_kind: Mapping[str, Sequence[EventDict]]) -> tuple[NodeFigures, ...]:
    joined = {event["who"]: event for event in by_kind["joined"]}
    left = {event["who"]: event for event in by_kind["left"]}
    cpu: defaultdict[str, list[EventDict]] = defaultdict(list)
    memory: defaultdict[str, list[EventDict]] = defaultdict(list)
    for event in by_kind["cpu"]:
        cpu[event["node"]].append(event)
    for event in by_kind["memory"]:
        memory[event["node"]].append(event)
    carriers: defaultdict[str, set[str]] = defaultdict(set)
    for pair, carrier in carriers_of(by_kind["carriers"]).items():
        carriers[pair.partition(" ")[0]].add(carrier)
    found = []
    for name in sorted({*joined, *cpu, *memory}, key=_order):
        address = joined[name]["address"] if name in joined else ""
        found.append(
            NodeFigures(
                name=name,
                role=name.rpartition("-")[0] or name,
                host=_host(address),
                carriers=tuple(sorted(carriers[name])),
                joined_s=joined[name]["time_s"] if name in joined else None,
                left_s=left[name]["time_s"] if name in left else None,
                lost=name in left and left[name]["lost"],
                cpu_s=_total(map(_cpu_s, cpu[name])),
                cpu=_rates(cpu[name]),
                memory=tuple(
                    (event["time_s"], event.get("own_bytes") or event["peak_own_bytes"])
                    for event in memory[name]
                ),
                peak_bytes=max((event["peak_own_bytes"] for event in memory[name]), default=0),
            )
        )
    return tuple(found)


def _host(address: str) -> str:
    """Host of host:port or [host]:port, the first of a node's addresses; the virtual network has no hosts."""
    address = address.partition(" ")[0]
    return "" if address.startswith("memory:") else address.rpartition(":")[0].strip("[]")


def _rates(samples: Sequence[EventDict]) -> Series:
    """Cores in use between one sample of CPU seconds and the next."""
    points = []
    for before, after in itertools.pairwise(samples):
        passed_s = after["time_s"] - before["time_s"]
        used_s = _cpu_s(after) - _cpu_s(before)
        if passed_s > 0 and used_s >= 0:  # not where the run was resumed
            points.append((after["time_s"], used_s / passed_s))
    return tuple(points)
