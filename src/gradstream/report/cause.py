"""The causes of slowness, and the thresholds from which each counts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from gradstream.report.worker_figures import WorkerFigures

__all__ = ["BUSY", "FULL", "NOTABLE", "SLOWER", "Reason", "share_for", "waited_for"]

NOTABLE = 0.15
"""Less than this share of workers' time is not worth a sentence."""
BUSY = 0.5
"""A shard that computes for this share of the time holds its workers up."""
FULL = 0.85
"""A machine, or a process of one core, is full from here."""
SLOWER = 1.2
"""Computing times that differ by less are alike."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a run is slow.

    Args:
        kind: of the cause.
        text: one sentence, with the figures it rests on.
        remedy: a change that would help.
        culprit: the node at fault; "" for none.
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
    """Seconds that a worker waited for these nodes."""
    return sum(seconds for name, seconds in worker.waited_for.items() if name in names)


def share_for(one: WorkerFigures, workers: Sequence[WorkerFigures]) -> float:
    """The share of the others' time that they waited for this one."""
    others = [worker for worker in workers if worker is not one]
    total_s = sum(worker.total_s for worker in others)
    return sum(waited_for(worker, {one.name}) for worker in others) / total_s if total_s else 0.0
