"""The reason why a run is slow, in one sentence: a pure function over its figures.

A worker either computes or waits. It waits because others compute longer, or because of the exchange. Waiting for
another worker counts as that worker's computing, as far as the gradients of a step differ in length
(`RunFigures.imbalance_s`). During the rest of the waiting, the other's contribution was on its way.

    others compute    one worker is slower; or durations vary, and each round has another slowest worker
    the exchange      the network of one worker is slow; or the cores of the only machine are full; or chunks are
                      tiny; or a shard is busy all the time; otherwise the carrier
    neither           the workers compute; a slow worker is named nevertheless

A gradient takes wall time, part of which is CPU time. If the two differ much, the machine is the cause rather than the
worker: other processes use its cores, or its disk is slow (see `for_cores`). Everything else on such a machine,
including waiting, is slower in the same proportion.

Two reasons come first if they take longer than all others: the worker that evaluates does not train meanwhile, and
checkpoints may hold workers up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gradstream.report.figures import RunFigures, ShardFigures
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


# ---- cause -------------------------------------------------------------------------------
# The reasons why a run is slow, and the thresholds from which each counts.

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
        workers: workers that made steps.
        cores: number of cores of the machine that all nodes shared; None if there were several machines, or if unknown.
        processes: whether each node was a process, so that it has its own CPU seconds.
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


def share_for(slow: WorkerFigures, workers: Sequence[WorkerFigures]) -> float:
    """The share of their time for which the other workers waited for a worker."""
    others = [worker for worker in workers if worker is not slow]
    total_s = sum(worker.total_s for worker in others)
    return sum(waited_for(worker, {slow.name}) for worker in others) / total_s if total_s else 0.0


# ---- exchanging --------------------------------------------------------------------------
# Reasons why the exchange takes long: the network of one worker, tiny chunks, a shard, or the carrier.

ALONE = 0.7
"""Share of the waiting that must lie after the arrival of all others, for one worker's network to be the reason."""
TINY_BYTES = 1 << 16
"""A smaller chunk costs more time for its message than for its bytes."""
MANY = 64
"""Fewer chunks than these cost little, however small they are."""
MESSAGE_S = 1e-3
"""If workers wait longer than this for each tiny chunk, the network is slow rather than the number of messages."""
ITEMSIZE_BYTES = 4
LONGER = "a longer period between exchanges (push_every, fetch_every)"


def for_network_of_one(run: SlowRun, shards: set[str]) -> Reason | None:
    """One worker's contributions come later than all others' by as much as the others wait for it.

    If all workers share a link, the last contribution is later by no more than its own transfer.
    """
    workers = run.workers
    caused = {worker.name: share_for(worker, workers) for worker in workers}
    worst = max(workers, key=lambda worker: caused[worker.name])
    waited_s = [waited_for(worker, {worst.name}) for worker in workers if worker is not worst]
    late_s = run.figures.late_s.get(worst.name, 0.0)
    if caused[worst.name] < NOTABLE or late_s < ALONE * statistics.mean(waited_s):
        return None
    return Reason(
        "late worker",
        f"{worst.name} computes as fast as the others, but its pushes come late; "
        f"the others waited {caused[worst.name]:.0%} of their time for it.",
        f"Look at the network of {worst.name}, which waited "
        f"{waited_for(worst, shards) / worst.total_s:.0%} of its own time for the exchange.",
        worst.name,
    )


def for_exchange(run: SlowRun, share: float) -> Reason:
    """The reason why workers wait for the exchange, rather than for others to compute.

    Args:
        share: share of the workers' time for which they wait, 0 to 1.
    """
    figures = run.figures
    busy = {shard.name: _busy(shard, figures.seconds, run.processes) for shard in figures.shards}
    busiest = max(busy, key=lambda name: busy[name], default="")
    cpu_s = math.fsum(node.cpu_s for node in figures.nodes) if run.processes else 0.0
    if run.cores and figures.seconds and cpu_s >= FULL * run.cores * figures.seconds:
        return Reason(
            "machine",
            f"The machine is full: its {run.cores} cores are busy all the time, and computing shares them with "
            f"the exchange, for which the workers waited {share:.0%} of their time.",
            f"Fewer workers on this machine, {LONGER}, or another machine.",
        )
    moved_bytes = _moved_bytes(figures)
    tiny = _for_chunks(figures, share * run.total_s, share, moved_bytes)
    if tiny is not None:
        return tiny
    if busy.get(busiest, 0.0) >= BUSY:
        return Reason(
            "server",
            f"{busiest} is busy {busy[busiest]:.0%} of the time with updates; the workers waited {share:.0%} "
            "of their time for the parameter server.",
            f"More shards (servers={len(figures.shards) + 1}), or {LONGER}.",
            busiest,
        )
    steps = sum(worker.steps for worker in run.workers)
    beside = f", while the busiest shard computed only {busy[busiest]:.0%} of the time" if busy else ""
    waited = f"the workers waited {share:.0%} of their time for the exchange"
    return _for_carrier(figures, f"{waited}, {moved_bytes / steps / 1e6:,.3g} MB a step{beside}.")


def _for_carrier(figures: RunFigures, waited: str) -> Reason:
    """The carrier, since no other reason is left."""
    carriers = sorted({carrier for node in figures.nodes for carrier in node.carriers})
    in_place = str(figures.summary.get("group") or "").startswith("shared")
    if in_place or carriers == ["shm"]:
        fewer = f"{LONGER[:1].upper()}{LONGER[1:]}, or fewer workers on this machine."
        return Reason("memory", f"Shared memory, and no network: {waited}", fewer)
    if len(figures.hosts) == 1:
        by = f" (carrier {', '.join(carriers)})" if carriers else ""
        faster = 'carrier="auto", which takes shared memory inside a machine where the system has it'
        return Reason("loopback", f"This machine's own sockets{by}: {waited}", f"{faster}; or {LONGER}.")
    return Reason("network", f"The network: {waited}", f"A faster network, or {LONGER}.")


def _for_chunks(figures: RunFigures, waited_s: float, share: float, moved_bytes: int) -> Reason | None:
    """Chunks so small that each costs a message rather than its bytes; None if they are not."""
    elems, total = figures.summary.get("chunk_elems"), figures.summary.get("num_parameters")
    if not figures.shards or not elems or not total:
        return None
    size_bytes, count = ITEMSIZE_BYTES * elems, -(-total // elems)
    if size_bytes >= TINY_BYTES or count < MANY or waited_s > MESSAGE_S * moved_bytes / size_bytes:
        return None
    return Reason(
        "chunks",
        f"Chunks are tiny: the parameters go as {count:,} chunks of {size_bytes:,} bytes, and each costs a "
        f"message; the workers waited {share:.0%} of their time for them.",
        "A larger chunk_elems: None chooses it.",
    )


def _moved_bytes(figures: RunFigures) -> int:
    if figures.links:
        return sum(link.pushed_bytes + link.fetched_bytes for link in figures.links)
    # A group of workers reports its bytes, but not by pairs of workers.
    return int(figures.summary.get("pushed_bytes", 0))


def _busy(shard: ShardFigures, seconds: float, processes: bool) -> float:
    """The share of its time for which a shard computes; a process that fills a core computes all the time."""
    if seconds <= 0:
        return 0.0
    cpu = shard.cpu_s / seconds if processes else 0.0
    return min(1.0, cpu) if cpu >= FULL else min(1.0, shard.apply_s / seconds)


# ---- host --------------------------------------------------------------------------------
# Reasons for slow gradients that lie in the machine: other processes use its cores, or its disk is slow.
#
# The part of a gradient's wall time that is not CPU time goes into reading samples, waiting for a core, or
# waiting for something else. Linux reports how long a thread waited for a core (`queued_s`); on other systems the
# load of the machine takes its place.
#
#     reading          the data set, or the disk below it, is slow
#     a core           the nodes of this run are too many; or other processes use the cores
#     something else   a device, a lock, paging

MOST = 0.5
"""A cause has to explain this share of the lost time."""
CROWDED = 1.5
"""Threads per core. From this load on, cores count as missing if the system does not report how long threads waited."""


def lost_share(workers: Sequence[WorkerFigures]) -> float:
    """The share of its gradients' time in which a worker neither computed nor read: the median of the workers."""
    return statistics.median(
        worker.lost_s / worker.compute_s if worker.compute_s else 0.0 for worker in workers
    )


def for_slow_worker(run: SlowRun, worker: WorkerFigures, slowness: float, about: str) -> Reason | None:
    """Why a worker's machine makes the worker slower than the others; None if the machine is not the cause.

    Args:
        worker: the slow worker.
        slowness: ratio of its time to the median worker's, > 1.
        about: text that says how slow the worker is, for the beginning of the sentence.
    """
    excess_s = worker.compute_s * (1 - 1 / slowness)
    if worker.lost_s >= MOST * excess_s:
        return for_cores(run, [worker], about)
    if worker.read_s >= MOST * excess_s:
        return for_reading([worker], about)
    return None


def for_reading(workers: Sequence[WorkerFigures], about: str = "") -> Reason:
    """Reading samples takes long.

    Args:
        workers: workers that spend much of their time reading.
        about: if the reason is about one slow worker, text that says how slow it is; "" for all workers.
    """
    read_s = math.fsum(worker.read_s for worker in workers)
    share, whose = (
        read_s / math.fsum(worker.total_s for worker in workers),
        "its" if about else "the workers'",
    )
    text = f"reading samples takes {share:.0%} of {whose} time ({read_s:,.1f} s)"
    return Reason(
        "reading",
        _sentence(about, f"{text}: the data set, or the disk below it, is slow"),
        "Samples in one file (an array, a memory map) that fits into memory, a faster disk, or less work for "
        "each sample in the data set.",
        workers[0].name if about else "",
    )


def for_cores(run: SlowRun, workers: Sequence[WorkerFigures], about: str = "") -> Reason:
    """Why workers take much longer for a gradient than the CPU time that they use for it.

    Args:
        workers: workers whose gradients take much longer than their CPU time.
        about: see `for_reading`.
    """
    compute_s = math.fsum(worker.compute_s for worker in workers)
    cpu_s = math.fsum(worker.cpu_s or 0.0 for worker in workers)
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
    queued = [worker.queued_s for worker in workers if worker.queued_s is not None]
    if queued:
        return math.fsum(queued) >= MOST * math.fsum(worker.lost_s for worker in workers)
    return any(worker.load and worker.cores and worker.load >= CROWDED * worker.cores for worker in workers)


def _used(figures: RunFigures, workers: Sequence[WorkerFigures]) -> float | None:
    """Number of cores that the nodes of this run used on the machines of these workers; None if unknown."""
    names = {worker.name for worker in workers}
    hosts = {node.host for node in figures.nodes if node.name in names}
    nodes = [node.cpu_s for node in figures.nodes if node.host in hosts]
    return math.fsum(nodes) / figures.seconds if nodes and figures.seconds else None


def _load(workers: Sequence[WorkerFigures], used: float | None) -> str:
    """A clause: "; the machine's load was 14.2 on 2 cores, of which this run used 0.3"."""
    most = max(workers, key=lambda worker: worker.load or 0.0)
    if most.load is None:
        return ""
    on = f" on {most.cores} cores" if most.cores else ""
    run = f", of which this run used {used:.1f}" if used is not None and on else ""
    return f"; the machine's load was {most.load:.1f}{on}{run}"


def _sentence(about: str, why: str) -> str:
    return f"{about}; {why}." if about else f"{why[:1].upper()}{why[1:]}."
