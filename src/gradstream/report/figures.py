"""Figures of each worker, shard, link and node of a run, as pure functions of its events.

Totals over the whole run are in `gradstream.report.summary`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradstream.report.staleness import StalenessRow, staleness_by
from gradstream.report.story import Moment, Status, status_of, story_of
from gradstream.report.summary import begin_s, carriers_of, summary_of
from gradstream.report.worker_figures import (
    WorkerFigures,
    attributed,
    by_node,
    cpu_s_of,
    rank_order,
    total_of,
    workers_of,
)
from gradstream.telemetry.events import EventDict

Series = tuple[tuple[float, float], ...]
"""(time_s, value), in the order of time."""


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """One shard. `apply_s`: seconds of its updates. `cpu_s`: CPU seconds of its process."""

    name: str
    updates: int
    apply_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """The exchange between a worker and a shard."""

    worker: str
    shard: str
    pushed_bytes: int
    fetched_bytes: int


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """One process.

    Args:
        host: host of its address; "" if unknown.
        carriers: carriers over which it reaches other nodes.
        joined_s, left_s: when it joined and left; None if it did not, or if that is unknown.
        lost: whether it disappeared without leaving.
        cpu_s: total CPU seconds.
        cpu: cores in use over time.
        memory: resident bytes without file pages, over time.
        peak_bytes: largest such memory.
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
class RunFigures:
    """Figures of a run by node. Tuples are in the order of ranks; times count from the beginning of training.

    `imbalance_s`: seconds for which workers would have waited for one another if only computing had taken time, i.e.
    the longest gradient of a step minus the worker's own, summed over steps and workers. `late_s`: by worker, seconds
    by which its contributions came after all others, at the shard where that was most. `checkpoint_pause_s`: seconds
    for which workers were paused for `num_checkpoints`.
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
    checkpoint_pause_s: float = 0.0
    num_checkpoints: int = 0

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the first step to the last event of training."""
        return max(0.0, self.end_s - self.begin_s)


def figures_of(events: Sequence[EventDict]) -> RunFigures:
    """All figures of a run by node. For a run without steps most of them are empty."""
    by_kind: defaultdict[str, list[EventDict]] = defaultdict(list)
    for event in events:
        by_kind[event["event"]].append(event)
    nodes = _nodes(by_kind)
    steps = by_kind["step"] = attributed(by_kind["step"])
    end_s = max((event["time_s"] for event in (*steps, *by_kind["finished"])), default=0.0)
    return RunFigures(
        summary=summary_of(events),
        status=status_of(events),
        begin_s=begin_s(steps),
        end_s=end_s,
        workers=workers_of(by_kind),
        shards=_shards(by_kind),
        links=_links(by_kind["link"]),
        nodes=nodes,
        story=story_of(by_kind),
        hosts=tuple(sorted({node.host for node in nodes if node.host})),
        imbalance_s=_imbalance_s(steps),
        late_s=_late_s(by_kind["applied"]),
        staleness=tuple(staleness_by(events)),
        checkpoint_pause_s=math.fsum(event["paused_s"] for event in by_kind["checkpoint"]),
        num_checkpoints=len(by_kind["checkpoint"]),
    )


def cost_of(figures: RunFigures, price_per_machine_hour: float) -> tuple[float, int]:
    """(cost, machines), for every machine that hosted a node, from the beginning of training to its end."""
    machines = max(1, len(figures.hosts))
    return price_per_machine_hour * machines * figures.end_s / 3600, machines


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
        who: max(counts[who] for counts in late.values())
        for who in {who for counts in late.values() for who in counts}
    }


def _shards(by_kind: Mapping[str, Sequence[EventDict]]) -> tuple[ShardFigures, ...]:
    updates: Counter[str] = Counter()
    for event in by_kind["applied"]:
        updates[event["node"]] += event["updates"]
    cpu = by_node(by_kind["cpu"])
    shards = []
    joined = {event["who"]: 0 for event in by_kind["joined"] if event["who"].startswith("shard-")}
    for name in sorted({**joined, **updates}, key=rank_order):
        apply_s = total_of(math.fsum(event["compute_s"].values()) for event in cpu[name])
        shards.append(ShardFigures(name, updates[name], apply_s, total_of(map(cpu_s_of, cpu[name]))))
    return tuple(shards)


def _links(events: Iterable[EventDict]) -> tuple[LinkFigures, ...]:
    pushed: Counter[tuple[str, str]] = Counter()
    fetched: Counter[tuple[str, str]] = Counter()
    for event in events:
        key = (event["node"], event["shard"])
        pushed[key] += event["pushed_bytes"]
        fetched[key] += event["fetched_bytes"]
    keys = sorted(pushed, key=lambda key: (rank_order(key[0]), rank_order(key[1])))
    return tuple(LinkFigures(*key, pushed[key], fetched[key]) for key in keys)


def _nodes(by_kind: Mapping[str, Sequence[EventDict]]) -> tuple[NodeFigures, ...]:
    joined = {event["who"]: event for event in by_kind["joined"]}
    left = {event["who"]: event for event in by_kind["left"]}
    for name, event in joined.items():  # the latest event, if a new process replaced a worker
        if name in left and left[name]["time_s"] < event["time_s"]:
            del left[name]
    cpu, memory = by_node(by_kind["cpu"]), by_node(by_kind["memory"])
    carriers: defaultdict[str, set[str]] = defaultdict(set)
    for pair, carrier in carriers_of(by_kind["carriers"]).items():
        carriers[pair.partition(" ")[0]].add(carrier)
    nodes = []
    for name in sorted({*joined, *cpu, *memory}, key=rank_order):
        address = joined[name]["address"] if name in joined else ""
        nodes.append(
            NodeFigures(
                name=name,
                role=name.rpartition("-")[0] or name,
                host=_host(address),
                carriers=tuple(sorted(carriers[name])),
                joined_s=joined[name]["time_s"] if name in joined else None,
                left_s=left[name]["time_s"] if name in left else None,
                lost=name in left and left[name]["lost"],
                cpu_s=total_of(map(cpu_s_of, cpu[name])),
                cpu=_rates(cpu[name]),
                memory=tuple(
                    (event["time_s"], event.get("own_bytes") or event["peak_own_bytes"])
                    for event in memory[name]
                ),
                peak_bytes=max((event["peak_own_bytes"] for event in memory[name]), default=0),
            )
        )
    return tuple(nodes)


def _host(address: str) -> str:
    """The host in the first of a node's addresses, host:port or [host]:port; "" on the virtual network."""
    address = address.partition(" ")[0]
    return "" if address.startswith("memory:") else address.rpartition(":")[0].strip("[]")


def _rates(samples: Sequence[EventDict]) -> Series:
    """Cores in use between successive samples of CPU seconds."""
    points = []
    for before, after in itertools.pairwise(samples):
        passed_s = after["time_s"] - before["time_s"]
        used_s = cpu_s_of(after) - cpu_s_of(before)
        if passed_s > 0 and used_s >= 0:  # a resumed run starts at 0 again
            points.append((after["time_s"], used_s / passed_s))
    return tuple(points)
