"""Reasons why the exchange takes long: the network of one worker, tiny chunks, a shard, or the carrier."""

from __future__ import annotations

import math
import statistics

from gradstream.report.cause import BUSY, FULL, NOTABLE, Reason, SlowRun, share_for, waited_for
from gradstream.report.figures import RunFigures, ShardFigures

ALONE = 0.7
"""Share of the waiting for a worker that must lie after the arrival of all others, for it alone to be late."""
TINY_BYTES = 1 << 16
"""A smaller chunk costs more time for its message than for its bytes."""
MANY = 64
"""Fewer chunks than these cost little, however small they are."""
MESSAGE_S = 1e-3
"""If workers wait longer for each tiny chunk, not the number of messages is slow but the network."""
ITEMSIZE_BYTES = 4
LONGER = "a longer period between exchanges (push_every, fetch_every)"


def for_network_of_one(run: SlowRun, shards: set[str]) -> Reason | None:
    """The reason is one worker whose contributions come so much later than all others' as the others wait for it.

    If all workers share a link, the last one comes later by no more than its own transfer.
    """
    workers = run.workers
    caused = {one.name: share_for(one, workers) for one in workers}
    worst = max(workers, key=lambda one: caused[one.name])
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
    """The reason why workers wait for the exchange, and not for the computing of others.

    Args:
        run: the run.
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
    """The reason is the carrier, since no other one is left."""
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
    """The reason is that chunks are so small that each costs a message and not its bytes; None if they are not."""
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
    # A group of workers reports its bytes, but not by pair of workers.
    return int(figures.summary.get("pushed_bytes", 0))


def _busy(shard: ShardFigures, seconds: float, processes: bool) -> float:
    """The share of its time for which a shard computes; a process that fills a core computes all the time."""
    if seconds <= 0:
        return 0.0
    cpu = shard.cpu_s / seconds if processes else 0.0
    return min(1.0, cpu) if cpu >= FULL else min(1.0, shard.apply_s / seconds)
