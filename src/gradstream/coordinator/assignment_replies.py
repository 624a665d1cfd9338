"""Answers to workers that ask what to do next: minibatches, the end, shares of a round.

An answer of None has to wait: the coordinator asks again when something has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradstream.coordinator.assignment import BatchAssignment
from gradstream.coordinator.lead import Emit, Instruction, Lead, Lost, Refuse
from gradstream.coordinator.message_checks import RequestChecks
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.participation import ParticipationSchedule
from gradstream.coordinator.phases import Phases
from gradstream.coordinator.progress import receipt_of
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.data.base import BatchPlan
from gradstream.data.joined import JoinedPlan
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.data.plan import RoundPlan
from gradstream.data.reassignment import Epoch
from gradstream.data.shares import WorkerSpeed, begins_window, better
from gradstream.telemetry.events import SharesEvent
from gradstream.wire import v1

# ---- balance -----------------------------------------------------------------------------
# Shares of a round by measured speed, as a pure state machine: measurements go in, sizes come out.
#
# Before each rebalance window of rounds (`data.shares`) every worker reports how many samples it has gone through,
# and how long their gradients took. Once all have reported, `data.shares.better` decides the sizes once, and all
# workers get the same.
#
# A lost worker gets no samples from the next window on; until then another one computes its part. A new process in
# its place asks for the sizes of the round with which it begins, and has a part again from the next window on.

Round = tuple[int, int]
"""(data epoch, round of it)."""


class ShareBalance:
    """Decides how many samples of a round each worker takes.

    Args:
        plan: the coordinator's plan, which gets each decision, so that it knows the samples of each worker.

    Attributes:
        sizes: by rank, the present number of samples.
    """

    KEPT = ("sizes", "_speeds", "_asked", "_decided")
    """See `durable.state`."""

    def __init__(self, plan: BatchPlan) -> None:
        assert isinstance(plan, RoundPlan | JoinedPlan)
        self.sizes: Sequence[int] = plan.sizes(0, 0)
        self._plan = plan
        self._speeds = [WorkerSpeed() for _ in self.sizes]
        self._asked: dict[int, Round] = {}  # by rank, before which round
        self._decided: Round | None = None

    def took(self, rank: int, before: Round, measured: WorkerSpeed) -> None:
        """Takes the speed that a worker measured before this round. Repeating it changes nothing."""
        if self._asked.get(rank) != before:
            self._asked[rank] = before
            self._speeds[rank].measured(measured)

    def joined(self, rank: int) -> None:
        """Forgets what the process has measured in whose place a worker takes part."""
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
        """Returns the sizes from this round on; None while they are not decided.

        Inside of a window, and in the first round of the run, they are known: there a new process asks.
        """
        first = self._plan.nth(0, 0)
        if not begins_window(before[1]) or before == (first.epoch, first.batch):
            return self._plan.sizes(*before)
        return self.sizes if before == self._decided else None


# ---- assignment replies ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDistribution:
    """The account of all minibatches, and what decides which worker gets which.

    Args:
        ledger: records which minibatches are in the model.
        balance: decides the shares of a round by measured speed; None leaves them as planned.
        assignment: hands out minibatches to workers that ask; None if workers go through rounds, or bring
            data of their own.
        drives: whether the strategy decides which workers take part.
    """

    ledger: Ledger | OpenLedger
    balance: ShareBalance | None = None
    assignment: BatchAssignment | None = None
    drives: bool = False


class AssignmentReplies(Lead):
    """Answers from the present state. Methods that take a request raise RefusedError if it is impossible.

    Args:
        distribution: how the minibatches reach the workers.
        participation: which workers take part; None if all do.
        nodes: only members get answers.
        phases: no answer waits in a run that is over.
        snapshots: a run that ends early hands out nothing more.

    Attributes:
        assignment, balance: see `BatchDistribution`.
    """

    KEPT = ("_asked", "_answered")
    """See `durable.state`."""

    CACHES = ("_present",)
    """What follows from other attributes, and is made anew where it is missing."""

    def __init__(
        self,
        distribution: BatchDistribution,
        participation: ParticipationSchedule | None,
        nodes: Nodes,
        phases: Phases,
        snapshots: SnapshotRounds,
    ) -> None:
        self._ledger = distribution.ledger
        self.balance = distribution.balance
        self.assignment = distribution.assignment
        self._participation = participation
        self._nodes = nodes
        self._phases = phases
        self._snapshots = snapshots
        self._checks = RequestChecks(distribution.ledger, nodes.num_workers)
        self._asked: dict[str, int] = {}  # by worker, the number of its newest request
        self._answered: dict[str, tuple[int, v1.Assigned]] = {}  # of its newest answered one, and the answer
        self._present: tuple[list[v1.Node], frozenset[str], list[int]] = (
            [],
            frozenset(),
            [],
        )  # see `_active`

    # ---- minibatches ----------------------------------------------------------------------

    def durable(self) -> dict[str, object]:
        """See `Lead`."""
        parts = {"replies": self, "assignment": self.assignment, "balance": self.balance}
        return {name: part for name, part in parts.items() if part is not None}

    def on_join(self, node: v1.Node, at_s: float) -> list[Instruction]:
        """Forgets the requests and the speed of the process whose place a worker takes."""
        if node.role != "worker":
            return []
        self._asked.pop(node.name, None)
        self._answered.pop(node.name, None)
        if self.assignment is not None:
            self.assignment.joined(node.rank)
        if self.balance is not None:
            self.balance.joined(node.rank)
        return []

    def on_lost(self, lost: Lost, at_s: float) -> list[Instruction]:
        """Decides the shares for which the others wait."""
        return self.rebalance() if lost.worker else []

    def measured(self, who: str, request: v1.Ask) -> list[Instruction]:
        """Takes the speed that a worker has measured since it asked for minibatches last."""
        node = self._worker(who)
        if isinstance(node, Refuse) or self.assignment is None:
            return []
        self._checks.measured(who, request)
        if request.number <= self._asked.get(who, 0):
            return []
        self._asked[who] = request.number
        changed = self.assignment.took(node.rank, _speed_of(request), self._active)
        return [] if changed is None else [Emit(changed)]

    def assign(self, who: str, request: v1.Ask, at_s: float) -> v1.Assigned | Refuse | None:
        """Returns minibatches for a worker."""
        node = self._worker(who)
        if isinstance(node, Refuse):
            return node
        if self.assignment is None:
            return Refuse(v1.BAD_REQUEST, f"{who} asks for minibatches in a run that goes through rounds")
        number, before = self._answered.get(who, (0, v1.Assigned()))
        if request.number <= number:
            return before
        answer = self._assigned(node, request, at_s)
        if answer is not None:
            self._answered[who] = request.number, answer
        return answer

    def _assigned(self, node: v1.Node, request: v1.Ask, at_s: float) -> v1.Assigned | None:
        assert self.assignment is not None
        if self._snapshots.ending:
            return v1.Assigned(complete=True)
        interval = v1.Interval()
        if self._participation is not None:
            interval = self._participation.interval_of(node.name)
        active = self._active
        refs = () if interval.paused else self.assignment.block(node.rank, active, request.in_hand, at_s)
        complete = not refs and (self._ledger.finished or self._phases.over)
        if request.wait and not refs and not complete:
            return None
        receipts = [receipt_of(ref) for ref in refs]
        return v1.Assigned(batches=receipts, complete=complete, interval=interval.number)

    @property
    def _active(self) -> list[int]:
        """Ranks of the workers that are in and not paused: the same list as long as they are the same."""
        workers, paused = self._nodes.workers, frozenset[str]()
        if self._participation is not None:
            paused = frozenset(self._participation.paused)
        if self._present[0] is not workers or self._present[1] != paused:
            ranks = [node.rank for node in workers if node.name not in paused]
            self._present = workers, paused, ranks
        return self._present[2]

    # ---- loops of the user's own ----------------------------------------------------------

    def ending(self, who: str, request: v1.Ending) -> v1.Ended | Refuse | None:
        """Tells a worker without minibatches whether the run is over for it."""
        node = self._worker(who)
        if isinstance(node, Refuse):
            return node
        if not isinstance(self._ledger, OpenLedger):
            return Refuse(v1.BAD_REQUEST, f"{who} has run out of data in a run whose minibatches are planned")
        self._checks.ending(who, request)
        over = self._ledger.ended(node.rank, request.batches, request.samples, request.round)
        return None if over is None and not self._phases.over else v1.Ended(over=bool(over))

    def take_over(self, who: str, request: v1.TakeOver) -> v1.TakenOver | Refuse:
        """Gives a loop at the end of its part of an epoch minibatches that lost workers have left."""
        node = self._worker(who)
        if isinstance(node, Refuse):
            return node
        if not isinstance(self._ledger, OpenLedger):
            return Refuse(v1.BAD_REQUEST, f"{who} takes minibatches over in a run where they are handed out")
        self._checks.take_over(who, request)
        block = self._ledger.reassignment.take(
            node.rank,
            Epoch(request.epoch.loader, request.epoch.epoch),
            request.epoch.step,
            request.step,
            request.parts,
            request.per_step,
            request.oldest,
        )
        if block is None:
            return v1.TakenOver()
        return v1.TakenOver(epoch=block.epoch.number, rank=block.rank, first=block.first, count=block.size)

    # ---- shares of rounds -----------------------------------------------------------------

    def took(self, who: str, request: v1.Took) -> list[Instruction]:
        """Notes the speed that a worker has measured and sends to ask for the shares (samples) of a round."""
        node = self._worker(who)
        if isinstance(node, Refuse) or self.balance is None:
            return []
        self._checks.took(who, node.rank, request)
        self.balance.took(node.rank, (request.epoch, request.batch), _speed_of(request))
        return self.rebalance()

    def shares(self, who: str, request: v1.Took) -> v1.Shares | Refuse | None:
        """Returns the shares that a worker asks for."""
        node = self._worker(who)
        if isinstance(node, Refuse):
            return node
        if self.balance is None:
            return Refuse(v1.BAD_REQUEST, f"{who} asks for shares in a run that does not measure them")
        sizes = self.balance.decided((request.epoch, request.batch))
        return None if sizes is None else v1.Shares(samples=sizes)

    def rebalance(self) -> list[Instruction]:
        """Decides the shares that workers wait for, once all that are in, and do not wait to begin, have asked."""
        if self.balance is None:
            return []
        waiting = self._nodes.entering
        decided = self.balance.decide([node.rank for node in self._nodes.workers if node.name not in waiting])
        return [] if decided is None else [Emit(decided)]

    def _worker(self, who: str) -> v1.Node | Refuse:
        node = self._nodes.get(who)
        if node is None:
            return Refuse(v1.NOT_MEMBER, f"{who} is not a member in epoch {self._nodes.epoch}")
        if node.role != "worker":
            return Refuse(v1.BAD_REQUEST, f"{who} is no worker, and has no minibatches")
        return node


def _speed_of(request: v1.Ask | v1.Took) -> WorkerSpeed:
    return WorkerSpeed(request.rounds, request.samples, request.seconds, request.squares)
