"""Figures of a dry run: an estimate of memory, and the measured speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gradstream._simulate import simulate
from gradstream.job.job import Job
from gradstream.model.base import Model
from gradstream.report.summary import EventDict
from gradstream.runtime.simulation import SimulationConfig

__all__ = ["by_role", "count", "estimate", "quiet", "samples_per_s"]


def estimate(job: Job, model: Model) -> dict[str, dict[str, int]]:
    """Bytes of the vectors of each node, by name, as the nodes request them in a shape-only simulation.

    Its nodes are the real ones, with vectors that have a size and no elements.
    """
    little = dataclasses.replace(quiet(job), model=model, epochs=None, steps=1)
    run = simulate(little, config=SimulationConfig(shape_only=True))
    return {
        event["node"]: dict(event["vectors_bytes"])
        for event in run.events
        if event["event"] == "memory" and event["vectors_bytes"]
    }


def quiet(job: Job) -> Job:
    """The job without callbacks, trackers, evaluations and regular checkpoints."""
    return dataclasses.replace(job, evaluate_every=None, checkpoint_every=None, callbacks=(), trackers=())


def samples_per_s(events: Sequence[EventDict]) -> float | None:
    """Samples per second of all workers, each from the end of its first minibatch to the end of its last."""
    times: dict[int, list[tuple[float, int]]] = {}
    for event in events:
        if event["event"] == "step" and event["samples"]:
            times.setdefault(event["rank"], []).append((event["time_s"], event["samples"]))
    rates = [
        sum(samples for _, samples in steps[1:]) / (steps[-1][0] - steps[0][0])
        for steps in map(sorted, times.values())
        if steps[-1][0] > steps[0][0]
    ]
    return sum(rates) if rates else None


def by_role(by_node: Mapping[str, Any]) -> dict[str, Any]:
    """The value of the first node of each role; the first shard is the largest."""
    roles: dict[str, Any] = {}
    for node in sorted(by_node):
        roles.setdefault(node.partition("-")[0], by_node[node])
    return roles


def count(number: int, what: str, many: str = "s") -> str:
    """1 worker, 2 workers."""
    return f"{number:,} {what}" + ("" if number == 1 else many)
