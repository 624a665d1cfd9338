"""Orphaned pushes: pushes of lost workers without a receipt, until it is known how much of them the model has.

    lost ──▶ fence ──every shard's report──▶ applied by all chunks: a receipt
                                         ──▶ by none: handed out again
                                         ──▶ by some: to redo ──redone──▶ a receipt

A push is applied chunk by chunk, so a worker that dies may leave a torn push: some chunks have it, and others
do not. A living worker, the substitute, then computes its minibatches again, and pushes their sum in the lost worker's
name, under the same sequence number. Chunks that have it already skip it, so each chunk takes it once. If the
substitute dies, another one redoes all of it.

The replica of a worker may be several processes, which push their parts of the same gradients to their own shards
(`wire.chunks`). They are the senders of the same pushes: a push is whole if all chunks of all parts have it. Each
process of the substitute's replica then redoes the push of one sender.

In runs that do not redo pushes, others compute everything that a lost worker had without a receipt. If workers bring
their own data, the shards or, in pairs, the other workers report how many of its gradients the model has.

A node that does not report is itself lost after its lease; if it is a shard, that ends the run. Pure: no I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import override

from gradstream.coordinator.lead import (
    REPLICAS,
    SHARDS,
    WORKERS,
    Emit,
    Instruction,
    Lead,
    Lost,
    Notify,
    impossible,
)
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import MAX_COUNT, SampleProgress, receipt_of, ref_of
from gradstream.data.base import BatchRef
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import Gone, OpenLedger
from gradstream.telemetry.events import SettledEvent
from gradstream.transport.limits import worker_rank
from gradstream.wire import v1
from gradstream.wire.chunks import member_name, part_of


@dataclass(slots=True)
class LostPush:
    """The reports of shards on a push of a lost worker.

    Args:
        sequences: the push's sequence number, by sender: each process of the replica numbers its own pushes.
        applied: number of chunks that have applied it.
    """

    sequences: dict[str, int] = field(default_factory=dict)
    applied: int = 0


@dataclass(slots=True)
class Redo:
    """A torn push of a lost worker, which a living worker redoes.

    Args:
        substitute: rank of the living worker.
        batches: minibatches of the push.
        sequences: see `LostPush`.
        left: senders whose push has not been redone yet.
    """

    substitute: int
    batches: tuple[BatchRef, ...]
    sequences: dict[str, int]
    left: set[str]


@dataclass(slots=True)
class Orphans:
    """The minibatches that one lost worker had without a receipt.

    Args:
        rank: rank of the worker.
        senders: by name, the incarnation of each process of its replica.
        held: its minibatches whose fate is unknown, or that belong to a push to redo.
        awaited: names of the shards that have not reported.
        chunks: number of chunks of those that have.
        pushes: the reports on its pushes, by their minibatches.
        redos: pushes that are to be redone.
    """

    rank: int
    senders: dict[str, int]
    held: set[BatchRef]
    awaited: set[str]
    chunks: int = 0
    pushes: dict[tuple[BatchRef, ...], LostPush] = field(default_factory=dict)
    redos: list[Redo] = field(default_factory=list)


class OrphanedPushes(Lead):
    """Settles the pushes of each lost worker: their minibatches are receipted, handed out again, or redone.

    Args:
        progress: which minibatches are in the model.
        nodes: the members.
        redoes: whether others redo torn pushes; the run has planned its minibatches.
    """

    KEPT = ("_open",)
    """See `durable.state`."""

    REPORTS: ClassVar = {"orphaned": SHARDS, "contained": WORKERS, "shared": WORKERS, "redone": REPLICAS}

    def __init__(self, progress: SampleProgress, nodes: Nodes, *, redoes: bool) -> None:
        self._progress = progress
        self._ledger = progress.ledger
        self._nodes = nodes
        self._redoes = redoes
        self._open: list[Orphans] = []

    @property
    def settled(self) -> bool:
        """Whether the model has each push of lost workers completely, or not at all."""
        return not self._open and not self._gone

    @property
    def _gone(self) -> Mapping[tuple[int, int], Gone]:
        return self._ledger.gone if isinstance(self._ledger, OpenLedger) else {}

    @property
    def redos(self) -> list[Redo]:
        """All pushes that are to be redone."""
        return [redo for orphans in self._open for redo in orphans.redos]

    @property
    def awaited(self) -> list[str]:
        """Names of the nodes that have to report, or to redo a push."""
        shards = {name for orphans in self._open for name in orphans.awaited}
        return sorted(shards | {_substitute_of(redo, sender) for redo in self.redos for sender in redo.left})

    def on_lost(self, lost: Lost, at_s: float) -> list[Instruction]:
        """Fences a lost worker, and gives the pushes that it had to redo to others. It is no longer a member."""
        if isinstance(self._ledger, OpenLedger):
            self._ledger.teller_lost(lost.node.name)
        if not lost.worker:
            return []
        rank = lost.node.rank
        if isinstance(self._ledger, OpenLedger):
            tellers = self._nodes.placement.names or self._nodes.worker_names
            self._ledger.lost(rank, lost.node.incarnation, tellers)
        elif not self._redoes or lost.worker in self._nodes.leaving:
            self._ledger.lost(rank)
        if not self._redoes:
            return []
        assert isinstance(self._ledger, Ledger)
        held = set(self._ledger.leases.fence(rank))
        if held:
            self._open.append(Orphans(rank, dict(lost.replica), held, set(self._nodes.holders)))
        for redo in self.redos:
            if redo.substitute == rank:
                redo.substitute, redo.left = self._substitute(), set(redo.sequences)
        return []

    @override
    def check(self, node: v1.Node, kind: str, report: v1.SenderPushes | v1.Redone | int) -> None:
        if isinstance(report, int) and report > MAX_COUNT:
            raise impossible(node.name, f"{report} shared steps; expected up to 2^53")
        if not isinstance(report, v1.SenderPushes):
            return
        rank = worker_rank(report.sender)
        if rank is None or rank >= self._ledger.num_workers or report.gradients > MAX_COUNT:
            raise impossible(
                node.name, "orphaned pushes; expected those of workers, with up to 2^53 gradients"
            )

    def on_report(
        self, node: v1.Node, kind: str, report: v1.SenderPushes | v1.Redone | int, at_s: float
    ) -> list[Instruction]:
        """Takes a report on a lost worker, on what a worker has shared, or that a push was redone."""
        if isinstance(self._ledger, OpenLedger) and isinstance(report, int):
            self._ledger.shared(node.rank, report)
            return []
        if not self._redoes:
            if isinstance(self._ledger, OpenLedger) and isinstance(report, v1.SenderPushes):
                rank = worker_rank(report.sender)
                assert rank is not None  # by `check`
                self._ledger.told((rank, report.incarnation), node.name, report.gradients)
                return [Notify()]
            return []
        take: Callable[[str, Any], list[Instruction]] = self.redone if kind == "redone" else self.report
        out = take(node.name, report)
        if out:
            self._progress.heard(at_s)
        return out

    def report(self, shard: str, report: v1.SenderPushes) -> list[Instruction]:
        """Takes a report on what the chunks of a shard have applied. A repeated report changes nothing."""
        orphans = self._of(report.sender, report.incarnation)
        if orphans is None or shard not in orphans.awaited:
            return []
        orphans.awaited.remove(shard)
        orphans.chunks += report.chunks
        for push in report.pushes:
            batches = tuple(map(ref_of, push.batches))
            if not all(self._ledger.knows(ref, orphans.rank) for ref in batches):
                continue  # the lost worker has made that up; a shard cannot tell
            known = orphans.pushes.setdefault(batches, LostPush())
            known.sequences[report.sender] = push.sequence
            known.applied += push.applied
        return [] if orphans.awaited else self._decide(orphans)

    def _decide(self, orphans: Orphans) -> list[Instruction]:
        assert isinstance(self._ledger, Ledger)
        counts: defaultdict[str, int] = defaultdict(int)
        for batches, push in sorted(orphans.pushes.items(), key=lambda item: min(item[1].sequences.values())):
            known = [ref for ref in batches if ref in orphans.held]  # the others have their receipt
            if not known or not push.applied:
                continue
            if push.applied == orphans.chunks:
                counts["in_model"] += len(known)
                self._receipt(orphans, known)
            else:
                counts["torn"] += len(known)
                sequences = {**_unused(orphans), **push.sequences}
                orphans.redos.append(Redo(self._substitute(), batches, sequences, set(orphans.senders)))
        torn = {ref for redo in orphans.redos for ref in redo.batches}
        for ref in sorted(orphans.held - torn):
            counts["again"] += 1
            orphans.held.remove(ref)
            self._ledger.leases.give_back(ref)
        who = member_name(0, orphans.rank)
        event = SettledEvent(who=who, in_model=counts["in_model"], torn=counts["torn"], again=counts["again"])
        self._close(orphans)
        return [Emit(event), Notify()]

    def redone(self, substitute: str, done: v1.Redone) -> list[Instruction]:
        """Notes that every chunk of a part has a torn push now. Changes nothing if the sender is no substitute."""
        orphans = self._of(done.sender, done.incarnation)
        if orphans is None:
            return []
        for redo in orphans.redos:
            if (
                redo.sequences[done.sender] == done.sequence
                and _substitute_of(redo, done.sender) == substitute
            ):
                redo.left.discard(done.sender)
        done_redos = [redo for redo in orphans.redos if not redo.left]
        for redo in done_redos:
            orphans.redos.remove(redo)
            self._receipt(orphans, [ref for ref in redo.batches if ref in orphans.held])
            self._close(orphans)
        return [Notify()] if done_redos else []

    def notice(self, notice: v1.Notice) -> None:
        """Adds the lost workers whose pushes are not settled, sender by sender."""
        notice.fenced.extend(
            v1.Fenced(
                sender=who,
                incarnation=incarnation,
                redos=[
                    v1.Redo(
                        sequence=redo.sequences[who],
                        substitute=_substitute_of(redo, who),
                        batches=map(receipt_of, redo.batches),
                    )
                    for redo in orphans.redos
                ],
            )
            for orphans in self._open
            for who, incarnation in orphans.senders.items()
        )
        notice.fenced.extend(
            v1.Fenced(sender=member_name(0, rank), incarnation=incarnation)
            for rank, incarnation in self._gone
        )

    def _of(self, sender: str, incarnation: int) -> Orphans | None:
        return next((orphans for orphans in self._open if orphans.senders.get(sender) == incarnation), None)

    def _receipt(self, orphans: Orphans, refs: Iterable[BatchRef]) -> None:
        for ref in refs:
            orphans.held.remove(ref)
            self._ledger.receipt(ref, orphans.rank)

    def _close(self, orphans: Orphans) -> None:
        if not orphans.redos:
            self._open.remove(orphans)

    def _substitute(self) -> int:
        """Rank of the worker with the fewest pushes to redo; the lowest of several."""
        substitutes = [redo.substitute for redo in self.redos]
        return min((node.rank for node in self._nodes.workers), key=substitutes.count)


def _substitute_of(redo: Redo, sender: str) -> str:
    """Name of the process that redoes a sender's push: the one that holds the same part."""
    return member_name(part_of(sender), redo.substitute)


def _unused(orphans: Orphans) -> dict[str, int]:
    """By sender, an unused push number: for senders that had not begun a push which is torn."""
    used = [number for push in orphans.pushes.values() for number in push.sequences.values()]
    used += [number for redo in orphans.redos for number in redo.sequences.values()]
    return dict.fromkeys(orphans.senders, max(used) + 1)


# ---- stand ins ---------------------------------------------------------------------------
# Rounds that go on after a worker was lost: another one computes its part, or its part is skipped. Pure.
#
# `StandIns`: with servers or in a group, another worker stands in for the lost one until a new process has replaced
# it.
#
# `SkippedParts`: if workers exchange in pairs, nobody does.
#
#     worker r is lost            its part of each round that another worker has gone through is skipped
#     a new process joins as r    nothing more is skipped: it copies another worker's state, and goes on in its round
#     its first receipt comes     its part of the rounds before that one is skipped
#
# The summary of the run lists what was skipped.


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
