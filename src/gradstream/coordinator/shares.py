"""Shares of a round by measured speed, as a pure state machine: measurements go in, sizes come out.

Before each rebalance window of rounds (`data.shares`) every worker reports how many samples it has gone through,
and how long their gradients took. Once all have reported, `data.shares.better` decides the sizes, once, and all
workers get the same sizes.

A lost worker gets no samples from the next window on; until then another one computes its part. A new process in
its place asks for the sizes of the round with which it begins, and gets a part again from the next window on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from gradstream.coordinator.assignment import check_measured, speed_of
from gradstream.coordinator.lead import Emit, Instruction, Lead, Lost, Refuse, impossible
from gradstream.coordinator.nodes import Nodes
from gradstream.data.base import BatchPlan
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.data.plan import JoinedPlan, RoundPlan
from gradstream.data.shares import WorkerSpeed, begins_window, better
from gradstream.telemetry.events import SharesEvent
from gradstream.wire import v1

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
