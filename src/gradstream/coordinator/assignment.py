"""Which minibatches a worker gets that asks for some: a pure state machine.

A block is what a worker gets at once: small enough that the fast ones find something left, large enough that
nobody waits for the coordinator, and that training goes on while it is away.

    block = half of the worker's share of what is left of the epoch       (share: sᵢ / Σ s)
            at least FEW and FEW_S of its time, if that is not more than half of its share of the run
            at most `lead_s` of its time, and r² after r gradients: what they have shown may be wrong

Towards the end of the run a minibatch goes to the worker that is done with it first. Worker i, with hᵢ in
hand, would be done after cᵢ = (hᵢ + 1)·tᵢ. It gets none where the others can do all R that are left before:

    Σ_{j≠i} max(0, ⌈cᵢ / tⱼ⌉ - 1 - hⱼ)  ≥  R          for at most tᵢ, in which it could have done one

where t is the time of a minibatch, as the workers measure it. So the last one is done as early as can be.

Where sizes are measured, a worker's minibatch has sᵢ / Σ s of the samples of all workers' together: everybody
makes as many steps. Sizes change where that makes steps shorter by a twentieth at least.

Reference: guided self-scheduling, Polychronopoulos and Kuck 1987; weighted factoring, Hummel, Schmidt, Uma
and Wein 1996.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from gradstream.data.base import BatchRef
from gradstream.data.joined import unjoined
from gradstream.data.ledger import Ledger, Unassigned
from gradstream.data.queue_plan import QueuePlan
from gradstream.data.shares import WorkerSpeed, better
from gradstream.telemetry.events import SharesEvent

__all__ = ["BatchAssignment"]

FEW = 2
"""Minibatches: a worker has one in hand while it computes another, and asks meanwhile."""

SURE_AFTER = 2
"""Gradients that are measured before sizes change."""

FEW_S = 0.1
"""Seconds: longer than an answer takes."""

MOST = 256
"""Minibatches in one answer."""


class BatchAssignment:
    """Hands out the minibatches of a ledger.

    Args:
        ledger: has them.
        num_workers: W.
        lead_s: of a worker's time, how much it has in hand at most.
    """

    def __init__(self, ledger: Ledger, num_workers: int, lead_s: float) -> None:
        plan = unjoined(ledger.plan)
        self._ledger = ledger
        self._lead_s = lead_s
        self._plan = plan if isinstance(plan, QueuePlan) else None
        self._measures = isinstance(plan, QueuePlan) and plan.measured
        self._sizes: Sequence[int] = plan.sizes if isinstance(plan, QueuePlan) else (1,) * num_workers
        self._speeds = [WorkerSpeed() for _ in range(num_workers)]
        self._only_first: set[int] = set()  # ranks of which no more than the first gradient is known
        self._denied_s: dict[int, float] = {}  # by rank, since when

    def took(self, rank: int, measured: WorkerSpeed, present: Sequence[int]) -> SharesEvent | None:
        """A worker says how many units it did, in which time, since it said so last. Returns new sizes.

        What it says first is of its first gradient alone, which pays for much that no other does: that is
        forgotten as soon as it says more.
        """
        if measured.rounds:
            if rank in self._only_first:
                self._only_first.remove(rank)
                self._speeds[rank] = WorkerSpeed()
            elif not self._speeds[rank].rounds:
                self._only_first.add(rank)
            self._speeds[rank].measured(measured)
        if self._plan is None or not self._measures:
            return None
        sizes = better(self._sizes, {worker: self._speeds[worker] for worker in present})
        if sizes == self._sizes:
            return None
        self._sizes, unit, epoch = sizes, self._plan.unit, self._ledger.num_complete
        return SharesEvent(
            epoch=epoch,
            batch=self._ledger.num_batches(epoch),
            samples=[size * unit for size in sizes],
            per_s=[round((speed.per_s or 0.0) * unit, 3) for speed in self._speeds],
            changed=True,
        )

    def block(self, rank: int, present: Sequence[int], in_hand: int, at_s: float) -> tuple[BatchRef, ...]:
        """What a worker gets now. Nothing: it asks again when something has happened.

        Args:
            rank: of the worker.
            present: ranks of all workers that take part, this one among them.
            in_hand: minibatches of the worker that are not in the model yet.
            at_s: now.
        """
        left_over = self._ledger.unassigned(rank)
        if not left_over.run:
            return ()
        size = self._size(rank, present)
        if not size or self._others_sooner(rank, present, left_over, in_hand, at_s):
            return ()
        self._denied_s.pop(rank, None)
        return self._ledger.hand_out(rank, self._limit(rank, present, size, left_over), size)

    def _size(self, rank: int, present: Sequence[int]) -> int:
        """Units of its minibatch. 0: the others take all."""
        return self._sizes[rank] or (0 if any(self._sizes[other] for other in present) else max(self._sizes))

    def _limit(self, rank: int, present: Sequence[int], size: int, left_over: Unassigned) -> int:
        """How many minibatches it may have more."""
        known = self._speeds[rank].per_s
        if not known:
            return 1
        if self._measures and any(self._speeds[worker].rounds < SURE_AFTER for worker in present):
            return FEW  # of sizes that will be others soon
        share = known / math.fsum(self._per_s(present).values()) if self._ledger.helping else 1.0
        half = share / (2 * size)
        few = max(FEW, known * FEW_S / size)
        block = max(left_over.epoch * half, min(few, left_over.run * half))
        lead = max(FEW, known * self._lead_s / size)
        shown = max(FEW, self._speeds[rank].rounds ** 2)
        return max(1, min(MOST, math.ceil(block), math.floor(lead), math.floor(shown)))

    def _others_sooner(
        self, rank: int, present: Sequence[int], left_over: Unassigned, in_hand: int, at_s: float
    ) -> bool:
        """Whether the others can do all that is left before this worker has done one more."""
        if self._speeds[rank].per_s is None or len(present) < 2 or not self._ledger.helping:
            return False
        per_s = self._per_s(present)
        each_s = {worker: max(1, self._sizes[worker]) / per_s[worker] for worker in present}
        done_s = (in_hand + 1) * each_s[rank]
        left = left_over.run
        for worker in present:
            if worker != rank:
                more = math.ceil(done_s / each_s[worker]) - 1 - self._ledger.in_hand(worker)
                left -= max(0, more) * max(1, self._sizes[worker])
        if left > 0:
            return False
        if in_hand:  # it has something to do meanwhile
            return True
        return at_s - self._denied_s.setdefault(rank, at_s) <= each_s[rank]

    def _per_s(self, present: Sequence[int]) -> dict[int, float]:
        """Units a second; of a worker that has measured nothing, the median of the others."""
        known = {worker: self._speeds[worker].per_s for worker in present}
        typical = statistics.median([speed for speed in known.values() if speed] or [1.0])
        return {worker: speed or typical for worker, speed in known.items()}
