"""The reasons why a run is slow, and the thresholds from which each counts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gradstream.report.figures import RunFigures
from gradstream.report.worker_figures import WorkerFigures

NOTABLE = 0.15
"""A smaller share of the workers' time is not mentioned."""
BUSY = 0.5
"""A shard that computes for this share of the time slows its workers down."""
FULL = 0.85
"""A machine, or a process of one core, counts as full from this share of its cores' time."""
SLOWER = 1.2
"""Computing times whose ratio is smaller count as equal."""


Kind: TypeAlias = Literal[
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


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a run is slow.

    Args:
        kind: kind of the reason.
        text: one sentence, with the figures that it rests on.
        remedy: a change that would help.
        culprit: the node that causes it; "" for none.
    """

    kind: Kind
    text: str
    remedy: str = ""
    culprit: str = ""


@dataclass(frozen=True, slots=True)
class SlowRun:
    """A run whose slowness is to be explained.

    Args:
        figures: figures of the run.
        workers: its workers with steps.
        cores: number of cores of the machine that all nodes shared; None if there were several, or none.
        processes: whether each node was a process, so that it has CPU seconds of its own.
    """

    figures: RunFigures
    workers: Sequence[WorkerFigures]
    cores: int | None
    processes: bool

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all nodes shared one machine."""
        return len(self.figures.hosts) <= 1

    @property
    def total_s(self) -> float:
        """Seconds of all steps of all workers."""
        return math.fsum(worker.total_s for worker in self.workers)


def waited_for(worker: WorkerFigures, names: Collection[str]) -> float:
    """Seconds for which a worker waited for these nodes."""
    return sum(seconds for name, seconds in worker.waited_for.items() if name in names)


def share_for(one: WorkerFigures, workers: Sequence[WorkerFigures]) -> float:
    """The share of their time for which the other workers waited for this one."""
    others = [worker for worker in workers if worker is not one]
    total_s = sum(worker.total_s for worker in others)
    return sum(waited_for(worker, {one.name}) for worker in others) / total_s if total_s else 0.0
