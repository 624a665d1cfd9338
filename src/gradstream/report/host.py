"""Reasons for slow gradients that lie in the machine: other processes use its cores, or its disk is slow.

Of the wall time of a gradient, the part that is not CPU time goes into reading samples, waiting for a core, or waiting
for something else. Linux reports how long a thread waited for a core (`queued_s`); on other systems the load of the
machine takes its place.

    reading          the data set, or the disk below it, is slow
    a core           the nodes of this run are too many; or other processes use the cores
    something else   a device, a lock, paging
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from gradstream.report.cause import FULL, Kind, Reason, SlowRun
from gradstream.report.figures import RunFigures
from gradstream.report.worker_figures import WorkerFigures

MOST = 0.5
"""A cause has to explain this share of the lost time."""
CROWDED = 1.5
"""Threads per core. From this load on, cores are missing, if the system does not report how long threads waited."""


def lost_share(workers: Sequence[WorkerFigures]) -> float:
    """The share of its gradients' time in which a worker neither computed nor read: the median of the workers."""
    return statistics.median(one.lost_s / one.compute_s if one.compute_s else 0.0 for one in workers)


def for_slow_worker(run: SlowRun, one: WorkerFigures, slowness: float, about: str) -> Reason | None:
    """Finds why a worker's machine makes the worker slower than the others; None if the machine is not the cause.

    Args:
        run: the run.
        one: the slow worker.
        slowness: ratio of its time to the median worker's, > 1.
        about: text that says how slow the worker is, for the begin of the sentence.
    """
    excess_s = one.compute_s * (1 - 1 / slowness)
    if one.lost_s >= MOST * excess_s:
        return for_cores(run, [one], about)
    if one.read_s >= MOST * excess_s:
        return for_reading([one], about)
    return None


def for_reading(workers: Sequence[WorkerFigures], about: str = "") -> Reason:
    """Says that reading samples takes long.

    Args:
        workers: workers that spend much of their time reading.
        about: if the reason is about one slow worker, text that says how slow it is; "" for all workers.
    """
    read_s = math.fsum(one.read_s for one in workers)
    share, whose = read_s / math.fsum(one.total_s for one in workers), "its" if about else "the workers'"
    text = f"reading samples takes {share:.0%} of {whose} time ({read_s:,.1f} s)"
    return Reason(
        "reading",
        _sentence(about, f"{text}: the data set, or the disk below it, is slow"),
        "Samples in one file (an array, a memory map) that fits into memory, a faster disk, or less work for "
        "each sample in the data set.",
        workers[0].name if about else "",
    )


def for_cores(run: SlowRun, workers: Sequence[WorkerFigures], about: str = "") -> Reason:
    """Finds why workers take much longer for a gradient than the CPU time that they use for it.

    Args:
        run: the run.
        workers: workers whose gradients take much longer than their CPU time.
        about: see `for_reading`.
    """
    compute_s = math.fsum(one.compute_s for one in workers)
    cpu_s = math.fsum(one.cpu_s or 0.0 for one in workers)
    had = f"gradients took {compute_s:,.1f} s, and computed for {cpu_s:,.1f} s of them"
    used, cores = _used(run.figures, workers), run.cores or workers[0].cores
    kind: Kind
    if not run.processes:
        kind, text = (
            "machine",
            f"the nodes are threads of one process, and compute one after the other: {had}",
        )
        remedy = "A job file: its nodes are processes (`gradstream new` writes one)."
    elif cores and used is not None and used >= FULL * cores:
        kind, text = "machine", f"the machine is full: this run keeps its {cores} cores busy; {had}"
        remedy = "Fewer workers on this machine, or another machine."
    elif not _waited_for_cores(workers):
        kind, text = "blocked", f"gradients wait, and not for a core: {had}{_load(workers, used)}"
        remedy = (
            "Look in the model and the data set for a call that blocks: a device, a lock, a sleep; or memory that "
            "is full, so that pages are read back from the disk."
        )
    else:
        kind, text = "busy host", f"other processes hold the cores: {had}{_load(workers, used)}"
        remedy = (
            "End the other processes (`top` shows them), or run where there are none; in a container, raise its "
            "share of the processor."
        )
    return Reason(kind, _sentence(about, text), remedy, workers[0].name if about else "")


def _waited_for_cores(workers: Sequence[WorkerFigures]) -> bool:
    queued = [one.queued_s for one in workers if one.queued_s is not None]
    if queued:
        return math.fsum(queued) >= MOST * math.fsum(one.lost_s for one in workers)
    return any(one.load and one.cores and one.load >= CROWDED * one.cores for one in workers)


def _used(figures: RunFigures, workers: Sequence[WorkerFigures]) -> float | None:
    """Number of cores that the nodes of this run used on the machines of these workers; None if unknown."""
    names = {one.name for one in workers}
    hosts = {node.host for node in figures.nodes if node.name in names}
    nodes = [node.cpu_s for node in figures.nodes if node.host in hosts]
    return math.fsum(nodes) / figures.seconds if nodes and figures.seconds else None


def _load(workers: Sequence[WorkerFigures], used: float | None) -> str:
    """A clause: "; the machine's load was 14.2 on 2 cores, of which this run used 0.3"."""
    most = max(workers, key=lambda one: one.load or 0.0)
    if most.load is None:
        return ""
    on = f" on {most.cores} cores" if most.cores else ""
    run = f", of which this run used {used:.1f}" if used is not None and on else ""
    return f"; the machine's load was {most.load:.1f}{on}{run}"


def _sentence(about: str, why: str) -> str:
    return f"{about}; {why}." if about else f"{why[:1].upper()}{why[1:]}."
