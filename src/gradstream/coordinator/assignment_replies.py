"""What workers are answered that ask what to do next: minibatches, the end, shares of a round.

None is the answer that has to wait: the coordinator asks again when something has happened.
"""

from __future__ import annotations

from gradstream.coordinator.assignment import BatchAssignment
from gradstream.coordinator.balance import ShareBalance
from gradstream.coordinator.claims import Claims
from gradstream.coordinator.instructions import Emit, Instruction, Refuse
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.participation import ParticipationSchedule
from gradstream.coordinator.phases import Phases
from gradstream.coordinator.receipts import receipt_of
from gradstream.coordinator.snapshot import SnapshotRounds
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.data.reassignment import Epoch
from gradstream.data.shares import WorkerSpeed
from gradstream.wire import v1

__all__ = ["AssignmentReplies"]


class AssignmentReplies:
    """Answers from what is known now.

    Args:
        ledger: has the batches.
        nodes: only members are answered.
        phases: nobody waits in a run that is over.
        snapshots: in one that ends early, nothing more is handed out.
        balance: decides the shares of a round; None where nobody asks.
        assignment: hands out minibatches; None where workers go through rounds, or bring their own.
        participation: who is held back gets nothing; None where nobody is.
        claims: says what a worker can have to say.
    """

    def __init__(
        self,
        ledger: Ledger | OpenLedger,
        nodes: Nodes,
        phases: Phases,
        snapshots: SnapshotRounds,
        balance: ShareBalance | None,
        assignment: BatchAssignment | None,
        participation: ParticipationSchedule | None,
        claims: Claims,
    ) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._phases = phases
        self._snapshots = snapshots
        self._balance = balance
        self._assignment = assignment
        self._asked: dict[str, int] = {}  # number of the newest ask
        self._answered: dict[str, tuple[int, v1.Assigned]] = {}  # of the newest that was answered, and how
        self._participation = participation
        self._claims = claims

    def measured(self, who: str, request: v1.Ask) -> list[Instruction]:
        """A worker says how fast it was since it asked for minibatches last.

        Raises:
            RefusedError: it says what cannot be.
        """
        node = self._worker(who)
        if isinstance(node, Refuse) or self._assignment is None:
            return []
        self._claims.check_ask(who, request)
        if request.number <= self._asked.get(who, 0):
            return []
        self._asked[who] = request.number
        measured = WorkerSpeed(request.rounds, request.samples, request.seconds, request.squares)
        changed = self._assignment.took(node.rank, measured, self._taking_part)
        return [] if changed is None else [Emit(changed)]

    def assign(self, who: str, request: v1.Ask, at_s: float) -> v1.Assigned | Refuse | None:
        """Minibatches for `who` to go through; None when the answer has to wait."""
        node = self._worker(who)
        if isinstance(node, Refuse):
            return node
        if self._assignment is None:
            return Refuse(v1.BAD_REQUEST, f"{who} asks for minibatches in a run that goes through rounds")
        number, before = self._answered.get(who, (0, v1.Assigned()))
        if request.number <= number:
            return before
        answer = self._assigned(node, request, at_s)
        if answer is not None:
            self._answered[who] = request.number, answer
        return answer

    def _assigned(self, node: v1.Node, request: v1.Ask, at_s: float) -> v1.Assigned | None:
        assert self._assignment is not None
        if self._snapshots.ending:
            return v1.Assigned(complete=True)
        interval = (
            self._participation.interval_of(node.name) if self._participation is not None else v1.Interval()
        )
        part, held = self._taking_part, interval.paused
        refs = () if held else self._assignment.block(node.rank, part, request.in_hand, at_s)
        complete = not refs and (self._ledger.finished or self._phases.over)
        if request.wait and not refs and not complete:
            return None
        return v1.Assigned(
            batches=[receipt_of(ref) for ref in refs], complete=complete, interval=interval.number
        )

    @property
    def _taking_part(self) -> list[int]:
        """Ranks of the workers that are there and not held back."""
        held = set(self._participation.paused) if self._participation is not None else ()
        return [node.rank for node in self._nodes.workers if node.name not in held]

    def ending(self, who: str, request: v1.Ending) -> v1.Ended | Refuse | None:
        """A worker of an open-ended run has no minibatches left; None when the answer has to wait.

        Raises:
            RefusedError: it says what cannot be.
        """
        node = self._worker(who)
        if isinstance(node, Refuse):
            return node
        if not isinstance(self._ledger, OpenLedger):
            return Refuse(v1.BAD_REQUEST, f"{who} has run out of data in a run whose minibatches are planned")
        self._claims.check_ending(who, request)
        over = self._ledger.ended(node.rank, request.batches, request.samples, request.round)
        return None if over is None and not self._phases.over else v1.Ended(over=bool(over))

    def take_over(self, who: str, request: v1.TakeOver) -> v1.TakenOver | Refuse:
        """A worker whose own loop is at the end of its part of an epoch asks for what lost workers have left.

        Raises:
            RefusedError: it says what cannot be.
        """
        node = self._worker(who)
        if isinstance(node, Refuse):
            return node
        if not isinstance(self._ledger, OpenLedger):
            return Refuse(v1.BAD_REQUEST, f"{who} takes minibatches over in a run where they are handed out")
        self._claims.check_take_over(who, request)
        epoch = Epoch(request.epoch.loader, request.epoch.epoch)
        block = self._ledger.reassignment.take(
            node.rank,
            epoch,
            request.epoch.step,
            request.step,
            request.parts,
            request.per_step,
            request.oldest,
        )
        if block is None:
            return v1.TakenOver()
        return v1.TakenOver(epoch=block.epoch.number, rank=block.rank, first=block.first, count=block.size)

    def took(self, who: str, request: v1.Took) -> list[Instruction]:
        """A worker says how long its part of the rounds before took, and asks for the shares of the next.

        Raises:
            RefusedError: it says what cannot be.
        """
        node = self._worker(who)
        if isinstance(node, Refuse) or self._balance is None:
            return []
        self._claims.check_took(who, node.rank, request)
        measured = WorkerSpeed(request.rounds, request.samples, request.seconds, request.squares)
        self._balance.took(node.rank, (request.epoch, request.batch), measured)
        return self.rebalance()

    def shares(self, who: str, request: v1.Took) -> v1.Shares | Refuse | None:
        """The answer to it; None when it has to wait."""
        node = self._worker(who)
        if isinstance(node, Refuse):
            return node
        if self._balance is None:
            return Refuse(v1.BAD_REQUEST, f"{who} asks for shares in a run that does not measure them")
        sizes = self._balance.decided((request.epoch, request.batch))
        return None if sizes is None else v1.Shares(samples=sizes)

    def rebalance(self) -> list[Instruction]:
        """Decides the shares that workers wait for, once all who are in have asked."""
        if self._balance is None:
            return []
        decided = self._balance.decide([node.rank for node in self._nodes.workers])
        return [] if decided is None else [Emit(decided)]

    def _worker(self, who: str) -> v1.Node | Refuse:
        node = self._nodes.get(who)
        if node is None:
            return Refuse(v1.NOT_MEMBER, f"{who} is not a member in epoch {self._nodes.epoch}")
        if node.role != "worker":
            return Refuse(v1.BAD_REQUEST, f"{who} is no worker, and has no minibatches")
        return node
