"""The reasons why a run is slow, and the thresholds from which each counts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from gradstream.report.worker_figures import WorkerFigures

__all__ = ["BUSY", "FULL", "NOTABLE", "SLOWER", "Reason", "share_for", "waited_for"]

NOTABLE = 0.15
"""A smaller share of the workers' time is not mentioned."""
BUSY = 0.5
"""A shard that computes for this share of the time slows its workers down."""
FULL = 0.85
"""A machine, or a process of one core, counts as full from this share of its cores' time."""
SLOWER = 1.2
"""Computing times whose ratio is smaller count as equal."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a run is slow.

    Args:
        kind: kind of the reason.
        text: one sentence, with the figures that it rests on.
        remedy: a change that would help.
        culprit: the node that causes it; "" for none.
    """

    kind: Literal[
        "nothing",
        "evaluation",
        "paused",
        "checkpoints",
        "slow worker",
        "late worker",
        "busy host",
        "blocked",
        "reading",
        "varying steps",
        "machine",
        "chunks",
        "server",
        "memory",
        "loopback",
        "network",
        "compute",
    ]
    text: str
    remedy: str = ""
    culprit: str = ""


def waited_for(worker: WorkerFigures, names: Collection[str]) -> float:
    """Seconds for which a worker waited for these nodes."""
    return sum(seconds for name, seconds in worker.waited_for.items() if name in names)


def share_for(one: WorkerFigures, workers: Sequence[WorkerFigures]) -> float:
    """The share of their time for which the other workers waited for this one."""
    others = [worker for worker in workers if worker is not one]
    total_s = sum(worker.total_s for worker in others)
    return sum(waited_for(worker, {one.name}) for worker in others) / total_s if total_s else 0.0
