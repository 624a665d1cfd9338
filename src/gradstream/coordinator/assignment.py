"""Assigns minibatches to workers that ask for some: a pure state machine.

A worker gets a block of minibatches at a time. A block is small enough that fast workers still find some
left, and large enough that no worker waits for the coordinator, and that training continues while it is away.

    block = half of the worker's share of the rest of the epoch           (share: sᵢ / Σ s)
            at least FEW and FEW_S of its time, if that is at most half of its share of the run
            at most `lead_s` of its time, and r² minibatches after r gradients: few are not representative

Towards the end of the run, a minibatch goes to the worker that would complete it first. Worker i, which
holds hᵢ minibatches, would complete another one after cᵢ = (hᵢ + 1)·tᵢ. It gets none if the other workers can
complete the remaining R before that:

     Σ_{j≠i} max(0, ⌈cᵢ / tⱼ⌉ - 1 - hⱼ)  ≥  R          for tᵢ, in which it could have done one

where t is the measured time of a minibatch. So the last minibatch is complete as early as possible. After tᵢ it still
gets none, for at most as long again, if the others will finish sooner at their pace since it was
first denied: with D minibatches in e seconds, R·e/D ≤ tᵢ.

In passes (see `Leases`), this holds for each minibatch of a block, and an idle worker i gets a copy of a
minibatch that a worker j has, if it is expected to finish it sooner. Of the minibatches of all j it is the one
expected last:

     tᵢ < |gⱼ + nⱼ·tⱼ - now|         gⱼ: when j last got some; it is the nⱼ-th of those that j had then

What is late is expected to take as long again as it is late by now.

Where sizes are measured, the minibatch of worker i has the share sᵢ / Σ s of the samples, so that all workers
make equally many steps. Sizes change only if that makes steps shorter by at least a twentieth.

Reference: guided self-scheduling, Polychronopoulos and Kuck 1987; weighted factoring, Hummel, Schmidt, Uma
and Wein 1996.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from gradstream.coordinator.lead import Emit, Instruction, Lead, Lost, Refuse, impossible
from gradstream.coordinator.lifecycle import Lifecycle
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import MAX_COUNT, receipt_of
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.data.base import BatchPlan, BatchRef
from gradstream.data.feed import QueuePlan
from gradstream.data.leases import Copy, Unassigned
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.data.plan import JoinedPlan, RoundPlan, unjoined
from gradstream.data.shares import WorkerSpeed, begins_window, better
from gradstream.telemetry.events import SharesEvent
from gradstream.wire import v1

Floats = npt.NDArray[np.float64]

FEW = 2
"""Minibatches: the one that a worker computes, and the next one while it asks for more."""

SURE_AFTER = 2
"""Gradients of each worker that are measured before sizes count as settled."""

FEW_S = 0.1
"""Seconds: longer than an answer of the coordinator takes."""

MOST = 256
"""The most minibatches in one answer."""


class BatchAssignment:
    """Hands out the minibatches of a ledger.

    Args:
        ledger: has the minibatches.
        num_workers: number of workers.
        lead_s: the most seconds of work that a worker has in advance.
        copies: whether in passes idle workers get copies.
    """

    KEPT = ("_sizes", "_speeds", "_only_first", "_denied", "_given")
    """See `durable.state`."""

    CACHES = ("_changes", "_of", "_each", "_due", "_held")
    """Attributes derived from others, recomputed if missing."""

    def __init__(self, ledger: Ledger, num_workers: int, lead_s: float, *, copies: bool = True) -> None:
        plan = unjoined(ledger.plan)
        self._ledger = ledger
        self._lead_s = lead_s
        self._copies = copies
        self._plan = plan if isinstance(plan, QueuePlan) else None
        self._measures = isinstance(plan, QueuePlan) and plan.measured
        self._sizes: Sequence[int] = plan.sizes if isinstance(plan, QueuePlan) else (1,) * num_workers
        self._speeds = [WorkerSpeed() for _ in range(num_workers)]
        self._only_first: set[int] = set()  # ranks that have reported only their first gradient
        # by rank, since when it has been denied minibatches, and how many were left then
        self._denied: dict[int, tuple[float, int]] = {}
        self._given: dict[
            int, tuple[float, int]
        ] = {}  # by rank, when it last got minibatches, and how many it had then
        self._changes = 0  # of speeds, sizes and `_given`
        self._of: tuple[int, ...] = ()  # the workers of the cached values below
        self._each: tuple[int, dict[int, float]] = (-1, {})
        self._due: tuple[object, list[tuple[float, Copy]]] = (None, [])
        self._held: tuple[object, tuple[Floats, Floats, Floats]] | None = None

    def joined(self, rank: int) -> None:
        """Forgets the speed of a worker that a new process has replaced; or takes in a further worker."""
        self._changes += 1
        self._ledger.came(rank)
        further = rank + 1 - len(self._speeds)
        self._speeds += [WorkerSpeed() for _ in range(further)]
        self._sizes = (*self._sizes, *[self._sizes[0]] * further)
        self._speeds[rank] = WorkerSpeed()
        self._only_first.discard(rank)
        self._denied.pop(rank, None)
        self._given.pop(rank, None)

    def took(self, rank: int, measured: WorkerSpeed, present: Sequence[int]) -> SharesEvent | None:
        """Takes the speed that a worker has measured since its last report. Returns new sizes, if any.

        The first report covers only the first gradient, which is slower than all others: it is forgotten with
        the second report.

        Args:
            rank: rank of the worker.
            measured: its speed.
            present: ranks of all workers that take part.
        """
        if measured.rounds:
            self._changes += 1
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
        self._changes += 1
        self._sizes, unit, epoch = sizes, self._plan.unit, self._ledger.num_complete
        return SharesEvent(
            epoch=epoch,
            batch=self._ledger.num_batches(epoch),
            samples=[size * unit for size in sizes],
            per_s=[round((speed.per_s or 0.0) * unit, 3) for speed in self._speeds],
            changed=True,
        )

    def block(self, rank: int, present: Sequence[int], in_hand: int, at_s: float) -> tuple[BatchRef, ...]:
        """Returns the minibatches that a worker gets now; none if it should ask again later.

        Args:
            rank: rank of the worker.
            present: ranks of all workers that take part, including this one.
            in_hand: number of the worker's minibatches that are not in the model yet.
            at_s: current time in seconds.
        """
        leases = self._ledger.leases
        left_over = leases.unassigned(rank)
        if not left_over.run:
            return () if in_hand or not self._copies else self._copy(rank, present, at_s)
        size = self._size(rank, present)
        if not size or self._others_sooner(rank, present, left_over, in_hand, at_s):
            return ()
        self._denied.pop(rank, None)
        limit = self._limit(rank, present, size, left_over)
        if leases.in_passes and len(present) > 1:
            limit = self._in_time(rank, present, left_over, in_hand, limit)
        handed = leases.hand_out(rank, limit, size)
        self._given[rank] = at_s, in_hand + len(handed)
        self._changes += 1
        return handed

    def _copy(self, rank: int, present: Sequence[int], at_s: float) -> tuple[BatchRef, ...]:
        """A minibatch of another worker, if this one is expected to finish it sooner."""
        due = self._copies_due(present)
        first = next((entry for entry in due if entry[1].holder != rank), None)
        last = next((entry for entry in reversed(due) if entry[1].holder != rank), None)
        if first is None or last is None or not self._ledger.leases.takes(rank):
            return ()
        due_s, copy = max(first, last, key=lambda entry: abs(entry[0] - at_s))
        if abs(due_s - at_s) <= self._each_s(present)[rank]:
            return ()
        self._given[rank] = at_s, 1
        self._changes += 1
        return (self._ledger.leases.hand_out_copy(rank, copy),)

    def _copies_due(self, present: Sequence[int]) -> list[tuple[float, Copy]]:
        """When each minibatch that only one worker has is expected, the soonest first."""
        leases, each_s, progress = self._ledger.leases, self._each_s(present), self._given
        follows_from = leases.version, self._changes
        if self._due[0] != follows_from:
            due = [
                (
                    progress[copy.holder][0] + (progress[copy.holder][1] - copy.after) * each_s[copy.holder],
                    copy,
                )
                for copy in leases.copies()
                if copy.holder in progress and copy.holder in each_s
            ]
            self._due = follows_from, sorted(due, key=lambda entry: entry[0])
        return self._due[1]

    def _size(self, rank: int, present: Sequence[int]) -> int:
        """Size of the worker's minibatch; 0 if the others take everything."""
        return self._sizes[rank] or (0 if any(self._sizes[other] for other in present) else max(self._sizes))

    def _limit(self, rank: int, present: Sequence[int], size: int, left_over: Unassigned) -> int:
        """The most minibatches that the worker may get now."""
        known = self._speeds[rank].per_s
        if not known:
            return 1
        if self._measures and any(self._speeds[worker].rounds < SURE_AFTER for worker in present):
            return FEW  # sizes will change soon
        share = known / math.fsum(self._per_s(present).values()) if self._ledger.leases.helping else 1.0
        half = share / (2 * size)
        few = max(FEW, known * FEW_S / size)
        block = max(left_over.epoch * half, min(few, left_over.run * half))
        lead = max(FEW, known * self._lead_s / size)
        shown = max(FEW, self._speeds[rank].rounds ** 2)
        return max(1, min(MOST, math.ceil(block), math.floor(lead), math.floor(shown)))

    def _others_sooner(
        self, rank: int, present: Sequence[int], left_over: Unassigned, in_hand: int, at_s: float
    ) -> bool:
        """Whether the others can complete everything left before this worker completes one more."""
        if self._speeds[rank].per_s is None or len(present) < 2 or not self._ledger.leases.helping:
            return False
        if not self._others_can(rank, present, left_over.run, in_hand):
            return False
        if in_hand:  # the worker is busy meanwhile
            return True
        since_s, left = self._denied.setdefault(rank, (at_s, left_over.run))
        waits_s, done, own_s = at_s - since_s, left - left_over.run, self._each_s(present)[rank]
        return waits_s <= own_s or (waits_s <= 2 * own_s and left_over.run * waits_s <= done * own_s)

    def _others_can(self, rank: int, present: Sequence[int], left: int, in_hand: int) -> bool:
        """Whether the others can complete this many before this worker completes one more than it has."""
        each_s, leased, sizes = self._leased_of(present)
        own = present.index(rank)
        done_s = (in_hand + 1) * each_s[own]
        more = np.maximum(np.ceil(done_s / each_s) - 1 - leased, 0)
        more[own] = 0
        return left <= float(more @ sizes)

    def _in_time(
        self, rank: int, present: Sequence[int], left_over: Unassigned, in_hand: int, most: int
    ) -> int:
        """The largest block whose last minibatch the others could not complete sooner; at least one.

        The next pass waits for the last one. Which worker asks first, and gets a block before the others, is chance.
        """
        worth = range(1, most)  # block sizes beyond which one more may be worthwhile
        return 1 + bisect_left(
            worth, True, key=lambda n: self._others_can(rank, present, left_over.run - n, in_hand + n)
        )

    def _leased_of(self, present: Sequence[int]) -> tuple[Floats, Floats, Floats]:
        """By worker: seconds of a minibatch, number of minibatches without a receipt, and minibatch size."""
        leases, each_s = self._ledger.leases, self._each_s(present)
        if self._held is None or self._held[0] != leases.version:
            leased = np.array([leases.in_hand(rank) for rank in present], np.float64)
            sizes = np.array([max(1, self._sizes[rank]) for rank in present], np.float64)
            self._held = leases.version, (np.array(list(each_s.values())), leased, sizes)
        return self._held[1]

    def _each_s(self, present: Sequence[int]) -> dict[int, float]:
        """Seconds of each worker's next minibatch."""
        workers = tuple(present)  # a caller may change its list; tuples of the same objects compare fast
        if self._of != workers or self._each[0] != self._changes:
            per_s = self._per_s(present)
            each_s = {worker: max(1, self._sizes[worker]) / per_s[worker] for worker in present}
            self._of, self._each, self._due, self._held = workers, (self._changes, each_s), (None, []), None
        return self._each[1]

    def _per_s(self, present: Sequence[int]) -> dict[int, float]:
        """Speed of each worker; for a worker that has measured nothing, the median of the others."""
        known = {worker: self._speeds[worker].per_s for worker in present}
        typical = statistics.median([speed for speed in known.values() if speed] or [1.0])
        return {worker: speed or typical for worker, speed in known.items()}


# ---- requests ----------------------------------------------------------------------------

MOST_PER_S = 1e12
"""Samples per second: no worker is faster."""


def check_measured(who: str, request: v1.Took | v1.Ask) -> None:
    """Raises RefusedError for an impossible speed in a request."""
    measured = (request.rounds, request.samples, request.seconds, request.squares)
    if not all(math.isfinite(value) and 0 <= value <= MAX_COUNT for value in measured):
        raise impossible(who, f"a measurement of {measured}; expected finite numbers from 0 on")
    if 0 < request.samples < 1 or request.samples > MOST_PER_S * request.seconds:
        text = f"{request.samples:g} samples in {request.seconds:g} s; expected none, or 1 to {MOST_PER_S:g} a second"
        raise impossible(who, text)


def speed_of(request: v1.Ask | v1.Took) -> WorkerSpeed:
    """The speed that a worker has measured since its last request."""
    return WorkerSpeed(request.rounds, request.samples, request.seconds, request.squares)


class AssignmentReplies(Lead):
    """Answers workers that ask for minibatches.

    Args:
        assignment: hands them out; None if workers go through rounds, or bring their own data.
        ledger: the minibatches of the run.
        nodes: the members.
        life: no answer waits in a run that is over.
        snapshots: a run that ends early hands out nothing more.
    """

    KEPT = ("_asked", "_answered")
    """See `durable.state`."""

    CACHES = ("_present",)
    """Attributes derived from others, recomputed if missing."""

    REQUESTS: ClassVar = {"assign": v1.Ask}

    def __init__(
        self,
        assignment: BatchAssignment | None,
        ledger: Ledger | OpenLedger,
        nodes: Nodes,
        life: Lifecycle,
        snapshots: SnapshotRounds,
    ) -> None:
        self._assignment = assignment
        self._ledger = ledger
        self._nodes = nodes
        self._life = life
        self._snapshots = snapshots
        self._asked: dict[str, int] = {}  # by worker, the number of its newest request
        self._answered: dict[str, tuple[int, v1.Assigned]] = {}  # its newest answered request, and the answer
        self._present: tuple[list[v1.Node], list[int]] = ([], [])  # see `_active`

    @override
    def durable(self) -> dict[str, object]:
        return {"replies": self, **({} if self._assignment is None else {"assignment": self._assignment})}

    def on_join(self, node: v1.Node, at_s: float) -> list[Instruction]:
        """Forgets the requests and the speed of the process that a new one replaces."""
        if node.role == "worker":
            self._asked.pop(node.name, None)
            self._answered.pop(node.name, None)
            if self._assignment is not None:
                self._assignment.joined(node.rank)
        return []

    def on_request(self, node: v1.Node, request: v1.Ask, at_s: float) -> list[Instruction]:
        """Takes the speed that a worker has measured since its last request."""
        if self._assignment is None:
            return []
        check_measured(node.name, request)
        if request.number <= self._asked.get(node.name, 0):
            return []
        self._asked[node.name] = request.number
        changed = self._assignment.took(node.rank, speed_of(request), self._active)
        return [] if changed is None else [Emit(changed)]

    def answer(self, node: v1.Node, request: v1.Ask, at_s: float) -> v1.Assigned | Refuse | None:
        """Returns minibatches for a worker."""
        who = node.name
        if self._assignment is None:
            return Refuse(v1.BAD_REQUEST, f"{who} asks for minibatches in a run that goes through rounds")
        number, before = self._answered.get(who, (0, v1.Assigned()))
        if request.number <= number:
            return before
        answer = self._assigned(self._assignment, node, request, at_s)
        if answer is not None:
            self._answered[who] = request.number, answer
        return answer

    def _assigned(
        self, assignment: BatchAssignment, node: v1.Node, request: v1.Ask, at_s: float
    ) -> v1.Assigned | None:
        if self._snapshots.ending:
            return v1.Assigned(complete=True)
        refs = assignment.block(node.rank, self._active, request.in_hand, at_s)
        complete = not refs and (self._ledger.finished or self._life.over)
        if request.wait and not refs and not complete:
            return None
        receipts = [receipt_of(ref) for ref in refs]
        return v1.Assigned(batches=receipts, complete=complete)

    @property
    def _active(self) -> list[int]:
        """Ranks of the workers that are in and take part: the same list as long as they are the same."""
        workers = self._nodes.workers
        if self._present[0] is not workers:
            self._present = workers, [node.rank for node in workers]
        return self._present[1]


# ---- shares ------------------------------------------------------------------------------
# Shares of a round by measured speed, as a pure state machine: measurements go in, sizes come out.
#
# Before each rebalance window of rounds (`data.shares`) every worker reports how many samples it has gone through,
# and how long their gradients took. Once all have reported, `data.shares.better` decides the sizes, once, and all
# workers get the same sizes.
#
# A lost worker gets no samples from the next window on; until then another one computes its part. A new process in
# its place asks for the sizes of the round with which it begins, and gets a part again from the next window on.

Round = tuple[int, int]
"""(data epoch, round in it)."""


class ShareBalance:
    """Decides how many samples of a round each worker takes.

    Args:
        plan: the coordinator's plan, which gets each decision, so that it knows the samples of each worker.

    Attributes:
        sizes: by rank, the current number of samples.
    """

    KEPT = ("sizes", "_speeds", "_asked", "_decided")
    """See `durable.state`."""

    def __init__(self, plan: BatchPlan) -> None:
        assert isinstance(plan, RoundPlan | JoinedPlan)
        self.sizes: Sequence[int] = plan.sizes(0, 0)
        self._plan = plan
        self._speeds = [WorkerSpeed() for _ in self.sizes]
        self._asked: dict[int, Round] = {}  # by rank, before which round it asked
        self._decided: Round | None = None

    def took(self, rank: int, before: Round, measured: WorkerSpeed) -> None:
        """Takes the speed that a worker measured before this round. Repeating it changes nothing."""
        if self._asked.get(rank) != before:
            self._asked[rank] = before
            self._speeds[rank].measured(measured)

    def joined(self, rank: int) -> None:
        """Forgets the measurements of the process that a worker replaces."""
        self._speeds[rank] = WorkerSpeed()
        self._asked.pop(rank, None)

    def decide(self, present: Sequence[int]) -> SharesEvent | None:
        """Decides the sizes if all workers of the ranks `present` wait for it."""
        rounds = {self._asked.get(rank) for rank in present}
        before = rounds.pop() if len(rounds) == 1 else None
        if before is None or before == self._decided:
            return None
        self._decided = before
        sizes = better(self.sizes, {rank: self._speeds[rank] for rank in present})
        changed = sizes != tuple(self.sizes)
        self.sizes = sizes
        self._plan.reassign(*before, sizes)
        per_s = [round(speed.per_s or 0.0, 3) for speed in self._speeds]
        return SharesEvent(
            epoch=before[0], batch=before[1], samples=list(sizes), per_s=per_s, changed=changed
        )

    def decided(self, before: Round) -> Sequence[int] | None:
        """Returns the sizes from this round on; None while they are undecided.

        Inside a window, and in the first round of the run, they are known: a new process may ask there.
        """
        first = self._plan.nth(0, 0)
        if not begins_window(before[1]) or before == (first.epoch, first.batch):
            return self._plan.sizes(*before)
        return self.sizes if before == self._decided else None


class Shares(Lead):
    """Answers workers that ask for their shares of the rounds from a given one on.

    Args:
        balance: decides the shares; None leaves them as planned.
        ledger: the minibatches of the run.
        nodes: the members.
    """

    OTHERS_WAIT = True

    REQUESTS: ClassVar = {"shares": v1.Took}

    def __init__(self, balance: ShareBalance | None, ledger: Ledger | OpenLedger, nodes: Nodes) -> None:
        self.balance = balance
        self._ledger = ledger
        self._nodes = nodes

    @override
    def durable(self) -> dict[str, object]:
        return {} if self.balance is None else {"balance": self.balance}

    def on_join(self, node: v1.Node, at_s: float) -> list[Instruction]:
        """Forgets the speed of the process that a worker replaces."""
        if node.role == "worker" and self.balance is not None:
            self.balance.joined(node.rank)
        return []

    def on_lost(self, lost: Lost, at_s: float) -> list[Instruction]:
        """Decides the shares for which the others wait."""
        return self._rebalance() if lost.worker else []

    def on_request(self, node: v1.Node, request: v1.Took, at_s: float) -> list[Instruction]:
        """Notes the speed that a worker has measured."""
        if self.balance is None:
            return []
        check_measured(node.name, request)
        epoch, batch, ledger = request.epoch, request.batch, self._ledger
        if not isinstance(ledger, Ledger) or not (
            epoch < ledger.num_epochs and batch < ledger.plan.batches_in(node.rank, epoch)
        ):
            raise impossible(node.name, f"shares of round {batch} of epoch {epoch}: not planned")
        self.balance.took(node.rank, (epoch, batch), speed_of(request))
        return self._rebalance()

    def answer(self, node: v1.Node, request: v1.Took, at_s: float) -> v1.Shares | Refuse | None:
        """Returns the shares that a worker asks for."""
        if self.balance is None:
            return Refuse(v1.BAD_REQUEST, f"{node.name} asks for shares in a run that does not measure them")
        sizes = self.balance.decided((request.epoch, request.batch))
        return None if sizes is None else v1.Shares(samples=sizes)

    def _rebalance(self) -> list[Instruction]:
        """Decides the shares that workers wait for, once all members that do not wait to begin have asked."""
        if self.balance is None:
            return []
        waiting = self._nodes.entering
        ranks = [node.rank for node in self._nodes.workers if node.name not in waiting]
        decided = self.balance.decide(ranks)
        return [] if decided is None else [Emit(decided)]
