"""Orphaned pushes of a split replica: what becomes of them is decided over the shards of all parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradstream.coordinator.lead import Lost
from gradstream.coordinator.lost_work import OrphanedPushes
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import SampleProgress, receipt_of
from gradstream.data.base import BatchRef
from gradstream.data.ledger import Ledger
from gradstream.data.plan import PartitionPlan
from gradstream.telemetry.events import SettledEvent
from gradstream.wire import v1
from gradstream.wire.chunks import replica_of

WORKERS, PARTS = 3, 2
LOST = {"worker-1": 11, "part1-1": 12}


def lost() -> tuple[Ledger, OrphanedPushes, list[BatchRef]]:
    """Three replicas of two parts with a shard each; that of rank 1 is lost, and had three minibatches."""
    nodes = Nodes(WORKERS, PARTS, PARTS)
    for rank in range(WORKERS):
        for name in replica_of(rank, PARTS):
            if rank != 1:
                nodes.add(v1.Node(name=name, role=name.partition("-")[0], rank=rank, incarnation=1))
    ledger = Ledger(PartitionPlan(18, WORKERS, 2), epochs=1)
    refs = list(ledger.leases.hand_out(1, 3))
    orphans = OrphanedPushes(SampleProgress(ledger, None, None), nodes, redoes=True)
    lose(orphans, 1, LOST)
    return ledger, orphans, refs


def lose(orphans: OrphanedPushes, rank: int, replica: dict[str, int]) -> None:
    node = v1.Node(name=f"worker-{rank}", role="worker", rank=rank)
    assert not orphans.on_lost(Lost(node, "", node.name, replica), 0.0)


def told(orphans: OrphanedPushes) -> list[v1.Fenced]:
    notice = v1.Notice()
    orphans.notice(notice)
    return list(notice.fenced)


def report(sender: str, pushes: Sequence[tuple[int, BatchRef, int]]) -> v1.SenderPushes:
    """What a shard of two chunks says: (number, minibatch, chunks that have it) of each push."""
    kept = [
        v1.KeptPush(sequence=sequence, batches=[receipt_of(ref)], applied=applied)
        for sequence, ref, applied in pushes
    ]
    return v1.SenderPushes(sender=sender, incarnation=LOST[sender], chunks=2, pushes=kept)


def test_it_is_decided_over_the_chunks_of_all_parts() -> None:
    ledger, orphans, (whole, torn, none) = lost()
    assert orphans.awaited == ["shard-0", "shard-1"]
    assert not orphans.report("shard-0", report("worker-1", [(1, whole, 2), (2, torn, 2), (3, none, 0)]))
    (event, _) = orphans.report("shard-1", report("part1-1", [(4, whole, 2)]))
    assert event.event == SettledEvent(who="worker-1", in_model=1, torn=1, again=1)  # type: ignore[attr-defined]
    assert ledger.num_receipts == 1
    redos = {one.sender: one.redos for one in told(orphans)}
    assert [(one.substitute, one.sequence) for one in redos["worker-1"]] == [("worker-0", 2)]
    # Its part had not begun this push: it gets a number that no push of the replica has had.
    assert [(one.substitute, one.sequence) for one in redos["part1-1"]] == [("part1-0", 5)]


def test_what_a_lost_worker_has_made_up_is_nobodys_push() -> None:
    """A shard keeps what a push says of its minibatches; it does not know those of the run."""
    ledger, orphans, (first, *_) = lost()
    orphans.report("shard-0", report("worker-1", [(1, first, 2), (2, replace(first, batch=99), 1)]))
    orphans.report("shard-1", report("part1-1", [(1, first, 2)]))
    assert orphans.settled and ledger.num_receipts == 1


def test_a_push_is_redone_when_all_processes_of_the_substitute_have_redone_theirs() -> None:
    ledger, orphans, (torn, *_) = lost()
    orphans.report("shard-0", report("worker-1", [(1, torn, 1)]))
    orphans.report("shard-1", report("part1-1", [(1, torn, 0)]))
    done = [v1.Redone(sender=sender, incarnation=LOST[sender], sequence=1) for sender in LOST]
    assert not orphans.redone("worker-0", done[0])
    assert orphans.awaited == ["part1-0"]
    assert not orphans.redone("part1-2", done[1]), "it is no substitute"
    lose(orphans, 0, {"worker-0": 1, "part1-0": 1})
    assert orphans.awaited == ["part1-2", "worker-2"], "another replica does all of it again"
    assert not orphans.redone("part1-2", done[1])
    assert orphans.redone("worker-2", done[0])
    assert orphans.settled and ledger.num_receipts == 1
