"""Messages of members and peers are compared with the plan: an impossible message changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from gradstream._version import __version__
from gradstream.coordinator import Member
from gradstream.coordinator.assignment import ShareBalance, Shares
from gradstream.coordinator.lead import Emit, Refuse
from gradstream.coordinator.lifecycle import LossTolerance
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.registry import CoordinatorPlan
from gradstream.coordinator.snapshot_rounds import Snapshot
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.data.plan import RoundPlan
from gradstream.errors import GradstreamError, RefusedError
from gradstream.server.aggregation import rank_of
from gradstream.telemetry.events import FailedEvent, StartedEvent
from gradstream.wire import v1
from gradstream.wire.frames import SequenceWindow
from membership_cluster import Cluster, diligent, shard, worker

SPEC = v1.ModelSpec(fingerprint=0xAB, elems=100, dtype=v1.FLOAT32, chunk_elems=64)
HUGE = (1 << 32) - 1
VERY_HUGE = (1 << 64) - 1


def join(name: str, **changes: Any) -> v1.Join:
    role, _, rank = name.partition("-")
    node = v1.Node(name=name, role=role, rank=int(rank), address=f"{name}:1", incarnation=1)
    request = v1.Join(node=node, software=__version__, model=SPEC if role == "worker" else None)
    request.MergeFrom(v1.Join(**changes))
    return request


def membership(
    names: Sequence[str] = ("worker-0", "worker-1", "shard-0"), ledger: OpenLedger | None = None
) -> Membership:
    started = StartedEvent(
        job="j", workers=2, servers=1, strategy="synchronous", optimizer="sgd", num_parameters=0,
        num_samples=32, total_steps=8, in_rounds=True,
    )  # fmt: skip
    plan = RoundPlan(32, 4, 2, shares="measured")
    made = Membership(
        CoordinatorPlan(
            started=started,
            ledger=ledger or Ledger(plan, epochs=2),
            balance=ShareBalance(plan),
            losses=LossTolerance(survives_worker_loss=True, quorum=1),
        )
    )
    for name in names:
        assert not any(isinstance(one, Refuse) for one in made.join(join(name), 0.0))
    return made


GOOD = v1.Receipt(epoch=0, partition=0, batch=0)


def says(**report: Any) -> v1.Beat:
    """A beat with one report."""
    return v1.Beat(reports=[v1.BeatReport(**report)])


BEATS = {
    "a batch beyond the epoch": ("worker-0", v1.Beat(receipts=[GOOD, v1.Receipt(batch=4)])),
    "an epoch beyond the run": ("worker-0", v1.Beat(receipts=[GOOD, v1.Receipt(epoch=2)])),
    "a huge epoch": ("worker-0", v1.Beat(receipts=[GOOD, v1.Receipt(epoch=HUGE, batch=HUGE)])),
    "a partition that is not": ("worker-0", v1.Beat(receipts=[GOOD, v1.Receipt(partition=2)])),
    "a receipt of a shard": ("shard-0", v1.Beat(receipts=[GOOD])),
    "a shard that finishes": ("shard-0", v1.Beat(finished=True, relies=True)),
    "a shard that leaves": ("shard-0", v1.Beat(leaves=True)),
    "a report of nothing": ("worker-0", says()),
    "a report that the run has no use for": ("worker-0", says(handed=v1.HandOver())),
    "a group of a shard": ("shard-0", says(broken=1)),
    "a backup of a worker": ("worker-0", says(backed_up=1)),
    "new chunks of a worker": ("worker-0", says(resharded=v1.Resharded(first=1))),
    "a push that a shard redoes": ("shard-0", says(redone=v1.Redone(sender="worker-1"))),
    "a refused gradient of a shard": ("shard-0", says(refused=v1.Refused(batch=GOOD, in_a_row=1))),
    "a sound gradient of a shard": ("shard-0", says(sound=True)),
    "a refused gradient of no batch": (
        "worker-0",
        v1.Beat(
            receipts=[GOOD],
            reports=[v1.BeatReport(refused=v1.Refused(batch=v1.Receipt(batch=HUGE), in_a_row=1))],
        ),
    ),
    "a refused gradient of too many samples": (
        "worker-0",
        says(refused=v1.Refused(batch=GOOD, samples=VERY_HUGE, in_a_row=1)),
    ),
    "blame by a worker": (
        "worker-0",
        v1.Beat(failure=v1.Failure(error="NonFiniteError", culprit="worker-1")),
    ),
    "blame of a shard": (
        "shard-0",
        v1.Beat(failure=v1.Failure(error="NonFiniteError", culprit="coordinator")),
    ),
    "orphaned pushes of no worker": (
        "shard-0",
        says(orphaned=v1.SenderPushes(sender="shard-0", gradients=1)),
    ),
    "orphaned pushes of a worker": (
        "worker-0",
        says(orphaned=v1.SenderPushes(sender="worker-1", gradients=1)),
    ),
    "orphaned pushes of a rank that is not": (
        "shard-0",
        says(orphaned=v1.SenderPushes(sender="worker-2", gradients=1)),
    ),
    "too many orphaned pushes": (
        "shard-0",
        says(orphaned=v1.SenderPushes(sender="worker-1", gradients=VERY_HUGE)),
    ),
    "what a shard contains": ("shard-0", says(contained=v1.SenderPushes(sender="worker-1", gradients=1))),
    "contents of no worker": ("worker-0", says(contained=v1.SenderPushes(sender="shard-0"))),
    "too much that is shared": ("worker-0", says(shared=VERY_HUGE)),
    "a decision of a worker": ("worker-0", says(decision=v1.Decision(round=0, ranks=[0]))),
    "a decision on no round": ("shard-0", says(decision=v1.Decision(round=8, ranks=[0]))),
    "a decision on a huge round": ("shard-0", says(decision=v1.Decision(round=VERY_HUGE, ranks=[0]))),
    "a decision of no rank": ("shard-0", says(decision=v1.Decision(round=0, ranks=[2]))),
    "a decision of a rank twice": ("shard-0", says(decision=v1.Decision(round=0, ranks=[0, 0]))),
    "a decision of nobody": ("shard-0", says(decision=v1.Decision(round=0))),
    "a snapshot after too many": (
        "worker-0",
        says(snapshot=v1.SnapshotReport(number=1, count=VERY_HUGE)),
    ),
    "a report of no kind": (
        "worker-0",
        v1.Beat(
            receipts=[GOOD],
            reports=[v1.BeatReport(snapshot=v1.SnapshotReport.FromString(b"\x10\x63"))],
        ),
    ),
}


@pytest.mark.parametrize(("who", "beat"), BEATS.values(), ids=BEATS)
def test_a_beat_that_cannot_be_is_refused_as_a_whole(who: str, beat: v1.Beat) -> None:
    state = membership()
    with pytest.raises(RefusedError, match=f"{who} sent an impossible message"):
        state.check(who, beat)
    assert state.progress.ledger.num_receipts == 0


def test_beats_that_can_be_pass() -> None:
    state = membership()
    state.check(
        "worker-0", v1.Beat(receipts=[GOOD, v1.Receipt(epoch=1, partition=1, batch=3)], finished=True)
    )
    state.check("shard-0", says(decision=v1.Decision(round=7, ranks=[1])))


def test_receipts_of_an_open_ended_run_are_ones_own_and_not_far_ahead() -> None:
    state = membership(ledger=OpenLedger(2, rounds=False))
    state.check("worker-1", v1.Beat(receipts=[v1.Receipt(partition=1, batch=5)]))
    for receipt in (
        v1.Receipt(partition=0),
        v1.Receipt(partition=1, batch=HUGE),
        v1.Receipt(partition=1, epoch=1),
    ):
        with pytest.raises(RefusedError):
            state.check("worker-1", v1.Beat(receipts=[receipt]))


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": math.nan}, {"seconds": math.inf}, {"seconds": -1.0}, {"rounds": -1e6}, {"samples": 1e300},
        {"epoch": HUGE}, {"epoch": 2}, {"batch": 4}, {"batch": HUGE},
    ],
)  # fmt: skip
def test_measurements_that_are_none(changes: dict[str, Any]) -> None:
    state = membership()
    request = v1.Took(**{"rounds": 1.0, "samples": 4.0, "seconds": 0.5, "squares": 0.1, **changes})
    with pytest.raises(RefusedError):
        state.ask("worker-0", request, 0.0)
    assert (balance := state.lead(Shares).balance) is not None
    assert balance.sizes == (4, 4)


def test_only_workers_are_answered() -> None:
    state = membership()
    for request in (v1.Ask(), v1.Ending(), v1.Took()):
        assert state.ask("shard-0", request, 0.0) == []
        assert isinstance(state.answer("shard-0", request, 0.0), Refuse)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": v1.ModelSpec.FromString(b"\x18\x09")},
        {"model": v1.ModelSpec(elems=1 << 63)},
        {"model": v1.ModelSpec(elems=1 << 40, chunk_elems=64)},
        {"model": v1.ModelSpec(optimizer="no JSON")},
        {"model": v1.ModelSpec(optimizer='{"class": 3}')},
        {"tensors": [v1.TensorSpec(name="a", shape=[99], dtype="F32")]},
        {"tensors": [v1.TensorSpec(name="a", shape=[1 << 40] * 3, dtype="F32")]},
        {"tensors": [v1.TensorSpec(name="a", shape=[100], dtype="F99")]},
        {"buffers": [v1.TensorSpec(name="a", dtype="F32"), v1.TensorSpec(name="a", dtype="F32")]},
        {"fixed": [v1.TensorSpec(name="a", dtype="F32", same_as="b")]},
        {"node": v1.Node(address="\x1b[2J")},
    ],
    ids=lambda changes: str(next(iter(changes.items())))[:60].replace("\n", " "),
)
def test_a_model_that_cannot_be_does_not_get_in(changes: dict[str, Any]) -> None:
    state = membership(())
    (refused,) = state.join(join("worker-0", **changes), 0.0)
    assert isinstance(refused, Refuse)
    assert state.nodes.names == []
    assert state.admission.model is None


def test_reports_of_a_cut_out_of_turn_change_nothing() -> None:
    snapshot = Snapshot(1, ["worker-0"], ["shard-0"], in_rounds=True, last=False, began_s=0.0)
    snapshot.take("worker-0", v1.SnapshotReport(kind=v1.SnapshotReport.REACHED))
    snapshot.take("shard-0", v1.SnapshotReport(kind=v1.SnapshotReport.HELD, versions=[1]))
    snapshot.take("shard-0", v1.SnapshotReport(kind=v1.SnapshotReport.WRITTEN, sums=[1]))
    assert (snapshot.begun, snapshot.reached, snapshot.versions, snapshot.sums) == ({}, set(), {}, {})
    snapshot.take("worker-0", v1.SnapshotReport(kind=v1.SnapshotReport.BEGUN, count=3))
    assert snapshot.begun == {"worker-0": 3}


def test_what_a_node_says_of_its_failure_is_escaped_and_bounded() -> None:
    state = membership()
    failure = v1.Failure(error="E\x1b", message="m\u202e" + "x" * 100_000, traceback="a\nb\x1b[2J")
    out = state.beat("worker-0", v1.Beat(failure=failure), 1.0)
    (failed,) = [one.event for one in out if isinstance(one, Emit) and isinstance(one.event, FailedEvent)]
    assert failed.error == "E\\x1b"
    assert failed.traceback == "a\nb\\x1b[2J"
    assert failed.message.startswith("m\\u202e")
    assert len(state.notice.reason) < 10_000


async def lies(cluster: Cluster, member: Member) -> None:
    """Has a receipt for a batch that the run does not have."""
    await member.training()
    member.beat.receipts.append(v1.Receipt(epoch=HUGE, batch=HUGE))
    member.hurry()
    with pytest.raises(GradstreamError, match="sent an impossible message"):
        await member.over()


def test_a_worker_that_lies_is_lost_and_the_run_goes_on() -> None:
    cluster = Cluster()
    cluster.run(shard, worker(0, diligent), worker(1, lies))
    assert cluster.outcome is not None
    assert cluster.outcome.failed is None
    (left,) = [event for event in cluster.events if event["event"] == "left" and event["lost"]]
    assert "a receipt for" in left["reason"]


# ---- shards -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "worker", "worker-", "worker--1", "worker-1x", "worker-٣", "-1", "worker-99999999"]
)
def test_a_name_that_has_no_rank_is_a_typed_error(name: str) -> None:
    with pytest.raises(GradstreamError):
        rank_of(name)


def test_a_huge_sequence_number_takes_no_memory() -> None:
    window = SequenceWindow()
    window.add(3)
    window.add(1 << 62)
    assert (1 << 62) in window
    assert (1 << 62) - 1 not in window
    assert 5 in window  # long given up on
    assert window._above.bit_length() <= SequenceWindow.WIDTH
