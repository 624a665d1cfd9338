"""Rounds that go on after a worker was lost: another one computes its part, or its part is skipped. Pure.

`StandIns`: with servers or in a group, another worker stands in for the lost one until a new process has replaced
it.

`SkippedParts`: if workers exchange in pairs, nobody does.

    worker r is lost            its part of each round that another worker has gone through is skipped
    a new process joins as r    nothing more is skipped: it copies another worker's state, and goes on in its round
    its first receipt comes     its part of the rounds before that one is skipped

The summary of the run lists what was skipped.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from typing_extensions import override

from gradstream.coordinator.lead import WORKERS, Instruction, Lead, Lost, Notify, impossible
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import MAX_COUNT, SampleProgress, ref_of
from gradstream.data.ledger import Ledger
from gradstream.wire import v1


class StandIns(Lead):
    """Knows which workers compute the minibatches of lost workers.

    Args:
        nodes: the members of the run.
        progress: the minibatches in the model.
        hands_over: True, with servers: a newcomer begins when its stand-in hands over. False, in a group: all workers
            form a new group when a newcomer joins, and begin the next round together; it counts as active from its
            first
            receipt on.

    Attributes:
        ever_lost: ranks of the workers that were ever lost. Some of their receipts may have been on their way.
    """

    KEPT = ("_by_rank", "ever_lost")
    """See `durable.state`."""

    REPORTS: ClassVar = {"handed": WORKERS}

    def __init__(self, nodes: Nodes, progress: SampleProgress, *, hands_over: bool = True) -> None:
        self._nodes = nodes
        self._progress = progress
        self._hands_over = hands_over
        self._by_rank: dict[int, str] = {}  # by rank of a lost worker, the name of the worker that stands in
        self.ever_lost: set[int] = set()

    def on_lost(self, lost: Lost, at_s: float) -> list[Instruction]:
        """Finds a stand-in for a lost worker, and accounts for its part of rounds that are in the model."""
        if lost.worker:
            self.on_absent(lost.node.rank)
        return []

    def on_absent(self, rank: int) -> list[Instruction]:
        """Finds a stand-in, the least loaded worker, for a worker and for everybody that it stood in for."""
        self.ever_lost.add(rank)
        active = self._nodes.active_workers
        vacant = {rank, *(other for other, name in self._by_rank.items() if name not in active)}
        for absent in sorted(vacant):
            self._by_rank.pop(absent, None)
            load = Counter(self._by_rank.values())
            self._by_rank[absent] = min(active, key=lambda name: load[name])
        self._settle()
        return []

    def _settle(self) -> None:
        """Accounts for the parts of lost workers in rounds that are in the model."""
        ledger = self._progress.ledger
        if isinstance(ledger, Ledger):
            for rank in self.ever_lost:
                ledger.settle_rounds(rank)

    def on_join(self, node: v1.Node, at_s: float) -> list[Instruction]:
        """Notes that a new process has replaced a lost worker."""
        if node.role == "worker":
            self._nodes.entering.add(node.name)
            if not self._hands_over:
                self._by_rank.pop(node.rank, None)
        return []

    @override
    def check(self, node: v1.Node, kind: str, report: v1.HandOver) -> None:
        if report.rank >= self._nodes.num_workers or report.round > MAX_COUNT:
            raise impossible(
                node.name,
                f"it hands over to worker {report.rank} in round {report.round}; expected workers below "
                f"{self._nodes.num_workers} and rounds up to 2^53",
            )

    def on_report(self, node: v1.Node, kind: str, report: v1.HandOver, at_s: float) -> list[Instruction]:
        """Lets a newcomer begin after its stand-in has handed over.

        It does not begin if it was lost meanwhile: the stand-in learns that, and goes on.
        """
        rank = report.rank
        if self._by_rank.get(rank) != node.name or self._newcomer(rank) != report.newcomer:
            return []
        del self._by_rank[rank]
        self._nodes.enter(f"worker-{rank}", report.round)
        return [Notify()]

    def on_beat(self, node: v1.Node, beat: v1.Beat, at_s: float) -> list[Instruction]:
        """Accounts for lost workers, and lets newcomers begin that came too late for any round."""
        if not self._hands_over and (beat.receipts or beat.finished):
            self._nodes.entering.discard(node.name)  # a newcomer of a group has parameters by then
        self._settle()
        ledger = self._progress.ledger
        waiting = sorted(self._nodes.entering) if self._hands_over else []
        if not waiting or not ledger.finished or not isinstance(ledger, Ledger):
            return []
        number = self._progress.last_version(self._nodes.num_workers)  # of the final parameters
        for name in waiting:
            self._nodes.enter(name, number)
        return [Notify()]

    def _newcomer(self, rank: int) -> int:
        """Incarnation of the worker that waits to begin as this rank; 0 if there is none."""
        name = f"worker-{rank}"
        return self._nodes.incarnations[name] if name in self._nodes.entering else 0

    def notice(self, notice: v1.Notice) -> None:
        """Adds who stands in for whom."""
        notice.stand_ins.extend(
            v1.StandIn(rank=rank, worker=name, newcomer=self._newcomer(rank))
            for rank, name in sorted(self._by_rank.items())
        )


# ---- skipped parts -----------------------------------------------------------------------


class SkippedParts(Lead):
    """Skips parts that nobody computes.

    Args:
        ledger: the minibatches of the run.
    """

    KEPT = ("_gone", "_entering")
    """See `durable.state`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._gone: set[int] = set()
        self._entering: set[int] = set()

    def on_lost(self, lost: Lost, at_s: float) -> list[Instruction]:
        """Notes that a worker is lost."""
        if lost.worker:
            self._entering.discard(lost.node.rank)
            self._gone.add(lost.node.rank)
            self._settle()
        return []

    def on_join(self, node: v1.Node, at_s: float) -> list[Instruction]:
        """Notes that a new process has replaced a lost worker."""
        if node.role == "worker":
            self._gone.discard(node.rank)
            self._entering.add(node.rank)
        return []

    def on_beat(self, node: v1.Node, beat: v1.Beat, at_s: float) -> list[Instruction]:
        """Notes a worker's receipts, which are in the ledger, and whether it has gone through all rounds."""
        if not (beat.receipts or beat.finished):
            return []
        rank, plan = node.rank, self._ledger.plan
        if rank in self._entering:
            refs = map(ref_of, beat.receipts)
            first = [plan.batches_before(rank, ref.epoch) + ref.batch for ref in refs]
            self._entering.discard(rank)
            self._ledger.leave_out(rank, min(first, default=self._ledger.most_begun))
        self._settle()
        return []

    def _settle(self) -> None:
        """Skips the parts of lost workers in rounds that others have gone through."""
        if self._gone:
            until = self._ledger.latest(but=self._gone) + 1
            for rank in sorted(self._gone):
                self._ledger.leave_out(rank, until)
