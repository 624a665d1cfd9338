"""Why a run is slow, in one sentence: a pure function over its figures.

Workers' time is either computing or waiting; and they wait because others compute longer, or because
of the exchange. Waiting for another worker is the former as far as gradients of one step differ in length
(`Figures.imbalance_s`); for the rest of it, that worker's contribution was on its way.

    others compute    one worker is slower; or each is by turns, where durations vary
    the exchange      one worker's network is slow; or the cores of the one machine are full; or a
                      shard is busy all the time; or the network is what is left
    neither           computing is what takes the time; a slow worker is named even so

One worker also evaluates, and while it does, it does not train: that comes first where it takes long. Where a
strategy's drive holds workers back for longer than anything else takes, that is the reason, and meant to be.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gradstream.report.figures import Figures, ShardFigures, WorkerFigures

__all__ = ["Reason", "reason_of"]

NOTABLE = 0.15
"""Less than this share of workers' time is not worth a sentence."""
BUSY = 0.5
"""A shard that computes for this share of the time holds its workers up."""
FULL = 0.85
"""A machine, or a process of one core, is full from here."""
ALONE = 0.7
"""A worker is alone in being late if this part of the waiting for it was after all others had come."""
SLOWER = 1.2
"""Computing times that differ by less are alike."""


@dataclass(frozen=True, slots=True)
class Reason:
    """What holds a run up.

    Args:
        kind: which.
        text: one sentence, with the figures it rests on.
        remedy: what would help.
        culprit: the node that it names; "" for none.
    """

    kind: Literal[
        "nothing",
        "evaluation",
        "held back",
        "slow worker",
        "late worker",
        "turns",
        "machine",
        "server",
        "network",
        "compute",
    ]
    text: str
    remedy: str = ""
    culprit: str = ""


def reason_of(figures: Figures, cores: int | None = None, *, processes: bool = True) -> Reason:
    """What holds a run up most.

    Args:
        figures: of the run.
        cores: of the machine that all nodes shared; None where there were several, or none.
        processes: each node was one, so that its CPU seconds are its own.
    """
    workers = [worker for worker in figures.workers if worker.total_s > 0]
    if not workers:
        return Reason("nothing", "No step was finished, so there is nothing to say about speed.")
    total_s = sum(worker.total_s for worker in workers)
    names = {worker.name for worker in workers}
    for_workers = sum(_waited(worker, names - {worker.name}) for worker in workers) / total_s
    shards = {name for worker in workers for name in worker.waited_for} - names
    for_shards = sum(_waited(worker, shards) for worker in workers) / total_s
    evaluator = max(workers, key=lambda one: one.evaluate_s)
    if len(workers) > 1 and evaluator.evaluate_s >= NOTABLE * figures.seconds:
        return _for_evaluation(figures, workers, evaluator)
    held = statistics.mean(worker.held_s for worker in workers) / figures.seconds if figures.seconds else 0.0
    unequal = min(for_workers, figures.imbalance_s / total_s)
    exchange = for_workers + for_shards - unequal
    if held >= NOTABLE and held >= (1 - held) * max(unequal, exchange):
        return Reason(
            "held back",
            f"Workers are held back {held:.0%} of their time: the strategy says who takes part, and when.",
            "A shorter warm start, fewer waves, or a shorter end alone.",
        )
    if unequal >= NOTABLE and unequal >= exchange:
        return _for_computing(workers, for_workers)
    if exchange >= NOTABLE:
        busy = {shard.name: _busy(shard, figures.seconds, processes) for shard in figures.shards}
        late = _for_network_of_one(figures, workers, shards)
        return late or _for_exchange(figures, workers, exchange, cores if processes else None, busy)
    return _computing(figures, workers, total_s)


def _waited(worker: WorkerFigures, names: set[str]) -> float:
    return sum(seconds for name, seconds in worker.waited_for.items() if name in names)


def _slowness(one: WorkerFigures, workers: Sequence[WorkerFigures]) -> float | None:
    """How many times longer it computes on a sample than the median of the others."""
    others = [w.compute_s_per_sample for w in workers if w is not one]
    known = [seconds for seconds in others if seconds]
    if not known or one.compute_s_per_sample is None:
        return None
    return one.compute_s_per_sample / statistics.median(known)


def _for_evaluation(figures: Figures, workers: Sequence[WorkerFigures], one: WorkerFigures) -> Reason:
    share = one.evaluate_s / figures.seconds
    held_up = max(
        _share_for(one, workers), statistics.median(_idle(figures, w) for w in workers if w is not one)
    )
    return Reason(
        "evaluation",
        f"{one.name} looks at held-out samples {share:.0%} of the time; the others waited for it, or "
        f"had nothing left to do, {held_up:.0%} of theirs.",
        "A larger evaluate_every, or fewer held-out samples.",
        one.name,
    )


# ---- others compute longer --------------------------------------------------------------


def _for_computing(workers: Sequence[WorkerFigures], share: float) -> Reason:
    caused = {one.name: _share_for(one, workers) for one in workers}
    worst = max(workers, key=lambda one: caused[one.name])
    waited = caused[worst.name]
    slowness = _slowness(worst, workers) or 1.0
    if slowness < SLOWER:
        return Reason(
            "turns",
            f"Workers wait for one another {share:.0%} of their time, each by turns: the time of a step "
            "varies, and a round takes as long as its slowest worker.",
            "Backup workers (synchronous, backup=1), a strategy that waits for nobody (downpour), or fewer, "
            "larger minibatches.",
        )
    return Reason(
        "slow worker",
        f"{worst.name} computes {slowness:.1f} times slower than the median; "
        f"the others waited {waited:.0%} of their time for it.",
        f'Give {worst.name} a smaller share (shares="measured" finds it, batch_size by rank sets it) or a '
        "faster machine, or take a strategy that waits for nobody (downpour).",
        worst.name,
    )


def _share_for(one: WorkerFigures, workers: Sequence[WorkerFigures]) -> float:
    """The share of the others' time that they waited for this one."""
    others = [worker for worker in workers if worker is not one]
    total_s = sum(worker.total_s for worker in others)
    return sum(_waited(worker, {one.name}) for worker in others) / total_s if total_s else 0.0


# ---- the exchange -----------------------------------------------------------------------


def _for_network_of_one(
    figures: Figures, workers: Sequence[WorkerFigures], shards: set[str]
) -> Reason | None:
    """One worker whose contributions come later than all others', by as much as the others wait for it.

    Who is the last to get through a link that all share comes after the others only by its own turn.
    """
    caused = {one.name: _share_for(one, workers) for one in workers}
    worst = max(workers, key=lambda one: caused[one.name])
    waited_s = [_waited(worker, {worst.name}) for worker in workers if worker is not worst]
    late_s = figures.late_s.get(worst.name, 0.0)
    if caused[worst.name] < NOTABLE or late_s < ALONE * statistics.mean(waited_s):
        return None
    return Reason(
        "late worker",
        f"{worst.name} computes as fast as the others, but what it sends comes late; "
        f"the others waited {caused[worst.name]:.0%} of their time for it.",
        f"Look at the network of {worst.name}, which waited {_waited(worst, shards) / worst.total_s:.0%} of "
        "its own time for the exchange.",
        worst.name,
    )


def _for_exchange(
    figures: Figures,
    workers: Sequence[WorkerFigures],
    share: float,
    cores: int | None,
    busy: Mapping[str, float],
) -> Reason:
    busiest = max(busy, key=lambda name: busy[name], default="")
    used = (
        sum(node.cpu_s for node in figures.nodes) / (figures.seconds * cores)
        if cores and figures.seconds
        else 0.0
    )
    if used >= FULL:
        return Reason(
            "machine",
            f"The machine is full: its {cores} cores are busy all the time, and computing shares them with "
            f"the exchange, for which the workers waited {share:.0%} of their time.",
            "Fewer workers on this machine, a longer period between exchanges (push_every, fetch_every), "
            "or another machine.",
        )
    if busy.get(busiest, 0.0) >= BUSY:
        return Reason(
            "server",
            f"{busiest} is busy {busy[busiest]:.0%} of the time with updates; the workers waited {share:.0%} "
            "of their time for the parameter server.",
            f"More shards (servers={len(figures.shards) + 1}), or a longer period between exchanges "
            "(push_every, fetch_every).",
            busiest,
        )
    moved = sum(link.pushed_bytes + link.fetched_bytes for link in figures.links)
    if not figures.links:  # a group of workers tells of its bytes without saying between whom
        moved = figures.summary.get("pushed_bytes", 0)
    steps = sum(worker.steps for worker in workers)
    beside = f", while the busiest shard computed only {busy[busiest]:.0%} of the time" if busy else ""
    return Reason(
        "network",
        f"The network: the workers waited {share:.0%} of their time for what is exchanged, "
        f"{moved / steps / 1e6:,.3g} MB a step{beside}.",
        "A faster network, or a longer period between exchanges (push_every, fetch_every).",
    )


def _busy(shard: ShardFigures, seconds: float, processes: bool) -> float:
    """Of its time, how much a shard computes; a process that fills a core computes all the time."""
    if seconds <= 0:
        return 0.0
    cpu = shard.cpu_s / seconds if processes else 0.0
    return min(1.0, cpu) if cpu >= FULL else min(1.0, shard.apply_s / seconds)


# ---- computing --------------------------------------------------------------------------


def _computing(figures: Figures, workers: Sequence[WorkerFigures], total_s: float) -> Reason:
    share = sum(worker.compute_s + worker.own_s for worker in workers) / total_s
    slowness = {one.name: _slowness(one, workers) or 1.0 for one in workers}
    worst = max(slowness, key=lambda name: slowness[name])
    text = f"Computing: the workers spend {share:.0%} of their time in it, and next to none waiting."
    if slowness[worst] < SLOWER:
        return Reason("compute", text, "Only faster workers, or more of them.")
    idle = statistics.median(_idle(figures, one) for one in workers if one.name != worst)
    if idle >= NOTABLE:
        return Reason(
            "slow worker",
            f"{worst} computes {slowness[worst]:.1f} times slower than the median; nobody waits for it in a "
            f"step, but the others had nothing left to do {idle:.0%} of the time.",
            f"Give {worst} a smaller share of the data (shares by rank), or a faster machine.",
            worst,
        )
    return Reason(
        "slow worker",
        f"{worst} computes {slowness[worst]:.1f} times slower than the median; nobody waits for it, "
        f"and the workers spend {share:.0%} of their time computing.",
        f"A faster machine for {worst} would do most.",
        worst,
    )


def _idle(figures: Figures, worker: WorkerFigures) -> float:
    """Of the run, what lies outside of a worker's steps."""
    used_s = worker.total_s + worker.held_s
    return max(0.0, 1 - used_s / figures.seconds) if figures.seconds > 0 else 0.0
