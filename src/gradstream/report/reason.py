"""The reason why a run is slow, in one sentence: a pure function over its figures.

A worker either computes or waits. It waits because others compute longer, or because of the exchange. Waiting for
another worker counts as that worker's computing, as far as the gradients of a step differ in length
(`RunFigures.imbalance_s`). During the rest of the waiting, the other's contribution was on its way.

    others compute    one worker is slower; or durations vary, and each round has another slowest worker
    the exchange      the network of one worker is slow; or the cores of the only machine are full; or chunks are
                      tiny; or a shard is busy all the time; otherwise the carrier
    neither           the workers compute; a slow worker is named nevertheless

A gradient takes wall time, part of which is CPU time. If the two differ much, the machine is the cause rather than the
worker: other processes use its cores, or its disk is slow (see `report.cause`). Everything else on such a machine,
including waiting, is slower in the same proportion.

Two reasons come first if they take longer than all others: the worker that evaluates does not train meanwhile, and
checkpoints may hold workers up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from gradstream.report.cause import (
    NOTABLE,
    SLOWER,
    Reason,
    SlowRun,
    for_cores,
    for_exchange,
    for_network_of_one,
    for_reading,
    for_slow_worker,
    lost_share,
    share_for,
    waited_for,
)
from gradstream.report.figures import RunFigures
from gradstream.report.worker_figures import WorkerFigures

OF_CORES = ("busy host", "machine")
"""Reasons that affect all workers of a machine."""


def reason_of(figures: RunFigures, cores: int | None = None, *, processes: bool = True) -> Reason:
    """Returns the main reason why a run is slow.

    Args:
        cores: number of cores of the machine that all nodes shared; None if there were several machines, or if unknown.
        processes: whether each node was a process, so that it has its own CPU seconds.
    """
    workers = [worker for worker in figures.workers if worker.total_s > 0]
    if not workers:
        return Reason("nothing", "No step was finished, so there is nothing to say about speed.")
    run = SlowRun(figures, workers, cores, processes)
    total_s = run.total_s
    names = {worker.name for worker in workers}
    for_workers = math.fsum(waited_for(worker, names - {worker.name}) for worker in workers) / total_s
    shards = {name for worker in workers for name in worker.waited_for} - names
    for_shards = math.fsum(waited_for(worker, shards) for worker in workers) / total_s
    unequal = min(for_workers, figures.imbalance_s / total_s)
    exchange = for_workers + for_shards - unequal
    paused = _for_pauses(run, max(unequal, exchange))
    if paused is not None:
        return paused
    lost = lost_share(workers)
    slow = _for_computing(run, for_workers) if unequal >= max(NOTABLE, exchange) else None
    if slow is not None and slow.culprit and not (slow.kind in OF_CORES and lost >= NOTABLE):
        return slow  # only this worker: the others get their cores
    # On one machine, waiting becomes slower in the same proportion as computing.
    waiting = unequal + exchange if run.is_on_one_machine else 0.0
    without_cores = lost * (math.fsum(worker.compute_s for worker in workers) / total_s + waiting)
    rest = max(unequal, exchange) * (1 - lost if run.is_on_one_machine else 1.0)
    if without_cores >= NOTABLE and without_cores >= rest:
        return for_cores(run, workers)
    if slow is not None:
        return slow
    reading = math.fsum(worker.read_s for worker in workers) / total_s
    if reading >= NOTABLE and reading >= exchange:
        return for_reading(workers)
    if exchange >= NOTABLE:
        return for_network_of_one(run, shards) or for_exchange(run, exchange)
    return _computing(run)


def _for_pauses(run: SlowRun, waiting: float) -> Reason | None:
    """The reason why workers do not train, if that takes longest. `waiting` is a share of the steps."""
    figures, workers, seconds = run.figures, run.workers, run.figures.seconds
    if not seconds:
        return None
    evaluator = max(workers, key=lambda worker: worker.evaluate_s)
    if len(workers) > 1 and evaluator.evaluate_s >= NOTABLE * seconds:
        return _for_evaluation(run, evaluator)
    checkpoints = figures.checkpoint_pause_s / seconds
    if checkpoints >= max(NOTABLE, (1 - checkpoints) * waiting):
        return Reason(
            "checkpoints",
            f"Workers are paused {checkpoints:.0%} of the time for checkpoints: "
            f"{figures.checkpoint_pause_s:,.1f} s for {figures.num_checkpoints:,} of them.",
            "A longer checkpoint_every; or more free memory: without room for a copy they wait for the disk.",
        )
    return None


def _slowness(worker: WorkerFigures, workers: Sequence[WorkerFigures]) -> float | None:
    """How many times longer a worker computes per sample than the median of the others; None if unknown."""
    others = [w.compute_s_per_sample for w in workers if w is not worker]
    known = [seconds for seconds in others if seconds]
    if not known or worker.compute_s_per_sample is None:
        return None
    return worker.compute_s_per_sample / statistics.median(known)


def _for_evaluation(run: SlowRun, worker: WorkerFigures) -> Reason:
    share = worker.evaluate_s / run.figures.seconds
    idle = statistics.median(_idle(run.figures, other) for other in run.workers if other is not worker)
    idle = max(share_for(worker, run.workers), idle)
    return Reason(
        "evaluation",
        f"{worker.name} evaluates on held-out samples {share:.0%} of the time; the others waited for it, or "
        f"had nothing left to do, {idle:.0%} of theirs.",
        "A larger evaluate_every, or fewer held-out samples.",
        worker.name,
    )


# ---- others compute longer --------------------------------------------------------------


def _for_computing(run: SlowRun, share: float) -> Reason:
    workers = run.workers
    caused = {worker.name: share_for(worker, workers) for worker in workers}
    worst = max(workers, key=lambda worker: caused[worker.name])
    waited = caused[worst.name]
    slowness = _slowness(worst, workers) or 1.0
    if slowness < SLOWER:
        return Reason(
            "varying steps",
            f"Workers wait for one another {share:.0%} of their time, each now and then: the time of a step "
            "varies, and a round takes as long as its slowest worker.",
            "Backup workers (synchronous, backup=1), a strategy that waits for nobody (downpour), or fewer, "
            "larger minibatches.",
        )
    slower = (
        f"{worst.name} computes {slowness:.1f} times slower than the median; "
        f"the others waited {waited:.0%} of their time for it"
    )
    return for_slow_worker(run, worst, slowness, slower) or Reason(
        "slow worker",
        f"{slower}.",
        f'Give {worst.name} a smaller share (shares="measured" finds it, batch_size by rank sets it) or a '
        "faster machine, or take a strategy that waits for nobody (downpour).",
        worst.name,
    )


# ---- computing --------------------------------------------------------------------------


def _computing(run: SlowRun) -> Reason:
    workers, figures = run.workers, run.figures
    share = math.fsum(worker.compute_s + worker.own_s for worker in workers) / run.total_s
    worst = max(workers, key=lambda worker: _slowness(worker, workers) or 1.0)
    slowness = _slowness(worst, workers) or 1.0
    if slowness < SLOWER:
        text = f"Computing: the workers spend {share:.0%} of their time in it, and next to none waiting."
        return Reason("compute", text, "Only faster workers, or more of them.")
    slower = f"{worst.name} computes {slowness:.1f} times slower than the median"
    why = for_slow_worker(run, worst, slowness, slower)
    if why is not None:
        return why
    idle = statistics.median(_idle(figures, worker) for worker in workers if worker is not worst)
    if idle >= NOTABLE:
        return Reason(
            "slow worker",
            f"{slower}; nobody waits for it in a step, but the others had nothing left to do {idle:.0%} of "
            "the time.",
            f"Give {worst.name} a smaller share of the data (shares by rank), or a faster machine.",
            worst.name,
        )
    return Reason(
        "slow worker",
        f"{slower}; nobody waits for it, and the workers spend {share:.0%} of their time computing.",
        f"A faster machine for {worst.name} would do most.",
        worst.name,
    )


def _idle(figures: RunFigures, worker: WorkerFigures) -> float:
    """The share of the run in which a worker makes no steps."""
    return max(0.0, 1 - worker.total_s / figures.seconds) if figures.seconds > 0 else 0.0
