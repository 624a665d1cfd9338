from __future__ import annotations

from collections.abc import Sequence

import pytest

from gradstream._version import __version__
from gradstream.coordinator.assignment import BatchAssignment
from gradstream.coordinator.lead import Emit, Instruction, Notify, Refuse
from gradstream.coordinator.lifecycle import LossTolerance
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.progress import receipt_of
from gradstream.coordinator.registry import CoordinatorPlan
from gradstream.data.base import BatchRef
from gradstream.data.ledger import Ledger
from gradstream.data.plan import PartitionPlan
from gradstream.telemetry.events import Event, FailedEvent, FinishedEvent, LeftEvent, StartedEvent
from gradstream.wire import v1

SPEC = v1.ModelSpec(fingerprint=0xAB, elems=100, dtype=v1.FLOAT32, chunk_elems=64)


def make(
    workers: int = 2,
    servers: int = 1,
    *,
    survives: bool = True,
    epochs: int = 1,
    stays: str = "no more may come",
) -> Membership:
    started = StartedEvent(
        job="j",
        workers=workers,
        servers=servers,
        strategy="downpour",
        optimizer="sgd",
        num_parameters=0,
        num_samples=4 * workers,
        total_steps=2 * workers * epochs,
    )
    ledger = Ledger(PartitionPlan(4 * workers, 2, workers), epochs=epochs)
    assignment = BatchAssignment(ledger, workers, lead_s=10.0)
    losses = LossTolerance(survives_worker_loss=survives, stays=stays, obstacle=stays)
    return Membership(CoordinatorPlan(started=started, ledger=ledger, assignment=assignment, losses=losses))


def ask_of(number: int, *, wait: bool = False) -> v1.Ask:
    return v1.Ask(number=number, wait=wait)


def ask(
    name: str, *, model: v1.ModelSpec = SPEC, software: str = __version__, incarnation: int = 1
) -> v1.Join:
    role, _, rank = name.partition("-")
    node = v1.Node(name=name, role=role, rank=int(rank), address=f"{name}:1", incarnation=incarnation)
    return v1.Join(node=node, software=software, model=model if role == "worker" else None)


def gathered(**given: object) -> Membership:
    membership = make(**given)  # type: ignore[arg-type]
    for name in membership.nodes.missing:
        assert not refusals(membership.join(ask(name), 0.0))
    return membership


def refusals(instructions: Sequence[Instruction]) -> list[Refuse]:
    return [i for i in instructions if isinstance(i, Refuse)]


def events(instructions: Sequence[Instruction]) -> list[Event]:
    return [i.event for i in instructions if isinstance(i, Emit)]


def only(instructions: Sequence[Instruction], kind: type[Event]) -> Event:
    (found,) = [event for event in events(instructions) if isinstance(event, kind)]
    return found


def receipts(partition: int, batches: Sequence[int] = (0, 1), epoch: int = 0) -> list[v1.Receipt]:
    return [receipt_of(BatchRef(epoch, partition, batch)) for batch in batches]


def test_training_begins_when_the_last_has_joined() -> None:
    membership = make()
    membership.join(ask("worker-1"), 0.0)
    membership.join(ask("shard-0"), 0.0)
    assert (membership.life.status, membership.nodes.epoch) == (v1.Notice.GATHERING, 0)
    assert membership.nodes.missing == ["worker-0"]
    out = membership.join(ask("worker-0"), 0.0)
    started = only(out, StartedEvent)
    assert isinstance(started, StartedEvent)
    assert started.num_parameters == 100
    assert Notify() in out
    assert (membership.life.status, membership.nodes.epoch) == (v1.Notice.TRAINING, 1)
    assert [node.name for node in membership.notice.nodes] == ["shard-0", "worker-0", "worker-1"]
    assert membership.notice.model == SPEC


def test_training_begins_without_a_worker_that_may_come_later() -> None:
    membership = make()
    membership.nodes.gone = frozenset(["worker-1"])
    membership.join(ask("shard-0"), 0.0)
    assert membership.life.status == v1.Notice.GATHERING
    out = membership.join(ask("worker-0"), 0.0)
    assert membership.life.status == v1.Notice.TRAINING
    assert not [event for event in events(out) if isinstance(event, LeftEvent)]  # it was not there
    batches: list[v1.Receipt] = []  # all that there is to do
    for number in range(1, 5):
        answer = membership.answer("worker-0", ask_of(number), 0.0)
        assert isinstance(answer, v1.Assigned)
        batches += answer.batches
    assert batches == [*receipts(0), *receipts(1)]


def test_the_run_finishes_with_the_last_receipt_and_the_last_worker() -> None:
    membership = gathered()
    assert not membership.beat("worker-0", v1.Beat(receipts=receipts(0), finished=True), 1.0)
    out = membership.beat("worker-1", v1.Beat(receipts=receipts(1)), 2.0)
    assert [event.name for event in events(out)] == ["ledger"]
    assert membership.life.status == v1.Notice.TRAINING
    out = membership.beat("worker-1", v1.Beat(finished=True), 5.0)
    finished = only(out, FinishedEvent)
    assert isinstance(finished, FinishedEvent)
    assert (finished.samples, finished.train_s) == (8, 2.0)
    assert membership.life.status == v1.Notice.FINISHED
    assert not membership.lost("worker-0", "", 0.0)[0].event.lost  # type: ignore[attr-defined]


def test_another_model_is_refused_naming_both() -> None:
    membership = make()
    membership.join(ask("worker-0"), 0.0)
    other = v1.ModelSpec(fingerprint=0xCD, elems=101, dtype=v1.FLOAT32, chunk_elems=64)
    (refusal,) = refusals(membership.join(ask("worker-1", model=other), 0.0))
    assert refusal.code == v1.BAD_FINGERPRINT
    for part in ("worker-1", "worker-0", "00ab", "00cd", "101", "100"):
        assert part in refusal.message
    assert membership.nodes.missing == ["shard-0", "worker-1"]


@pytest.mark.parametrize(
    ("request_", "code", "part"),
    [
        (ask("worker-0", incarnation=2), v1.NOT_MEMBER, "is in already"),
        (ask("worker-2"), v1.BAD_REQUEST, "2 workers"),
        (ask("shard-1"), v1.BAD_REQUEST, "not expected"),
        (ask("worker-1", software="2"), v1.BAD_PROTOCOL, "gradstream 2"),
        (ask("worker-1", model=v1.ModelSpec()), v1.BAD_REQUEST, "without a model"),
    ],
)
def test_who_does_not_fit_is_refused_and_changes_nothing(request_: v1.Join, code: int, part: str) -> None:
    membership = make()
    membership.join(ask("worker-0"), 0.0)
    before = membership.notice
    (refusal,) = refusals(membership.join(request_, 0.0))
    assert refusal.code == code
    assert part in refusal.message
    assert membership.notice == before


def test_who_is_lost_while_gathering_may_come_again_but_not_later() -> None:
    membership = make()
    membership.join(ask("worker-0"), 0.0)
    membership.lost("worker-0", "gone", 0.0)
    assert membership.life.status == v1.Notice.GATHERING
    assert not refusals(membership.join(ask("worker-0", incarnation=2), 0.0))
    membership = gathered()
    membership.lost("worker-0", "gone", 0.0)
    (refusal,) = refusals(membership.join(ask("worker-0", incarnation=2), 0.0))
    assert refusal.code == v1.NOT_MEMBER


def test_certificates_of_lost_members_are_revoked_by_each_notice_from_then_on() -> None:
    membership = make()
    assert not refusals(membership.join(ask("worker-1"), 0.0))
    membership.lost("worker-1", "gone", 1.0, b"early")
    assert membership.notice.revoked == []  # before training it may come again, with what it has
    for name in membership.nodes.missing:
        assert not refusals(membership.join(ask(name), 2.0))
    membership.lost("worker-1", "gone", 3.0, b"digest of worker-1")
    membership.lost("worker-1", "told again", 3.0, b"another")
    assert membership.notice.revoked == [b"digest of worker-1"]


def test_a_quarantined_worker_is_lost_for_good_and_so_is_its_certificate() -> None:
    membership = gathered()
    receipt = v1.Receipt(epoch=0, partition=1, batch=0)
    for in_a_row in (1, 2, 3):
        assert "worker-1" not in membership.nodes.expelled
        refused = v1.Refused(batch=receipt, samples=4, step=7, what="a NaN \x1b[2J", in_a_row=in_a_row)
        membership.beat("worker-1", v1.Beat(reports=[v1.BeatReport(refused=refused)]), 1.0)
    why = membership.nodes.expelled["worker-1"]
    assert "its last 3 gradients were not finite (a NaN " in why and "\x1b" not in why
    membership.lost("worker-1", why, 2.0, b"digest of worker-1")
    assert membership.notice.revoked == [b"digest of worker-1"]
    (refusal,) = refusals(membership.join(ask("worker-1", incarnation=2), 3.0))
    assert refusal.code == v1.NOT_MEMBER and "quarantined" in refusal.message


def test_the_deadline_for_joining_names_who_is_missing() -> None:
    membership = make()
    membership.join(ask("shard-0"), 0.0)
    failed = only(membership.overdue(0.0), FailedEvent)
    assert isinstance(failed, FailedEvent)
    assert "worker-0, worker-1" in failed.message
    assert "in: shard-0" in failed.message
    assert "within 60 s" in failed.message and "its log" in failed.message
    assert "Deadlines(join_s=...)" in failed.message and "--set deadlines.join_s=" in failed.message
    assert membership.notice.status == v1.Notice.ABORTED
    assert membership.notice.culprit == "worker-0"
    assert not gathered().overdue(0.0)


def test_batches_of_a_lost_worker_are_taken_over() -> None:
    membership = gathered()
    for name in ("worker-1", "worker-0"):
        batches: list[v1.Receipt] = []
        for number in (1, 2):
            answer = membership.answer(name, ask_of(number), 0.0)
            assert isinstance(answer, v1.Assigned)
            batches += answer.batches
        assert batches == receipts(int(name[-1]))
    membership.beat("worker-1", v1.Beat(receipts=receipts(1, [0])), 1.0)
    membership.beat("worker-0", v1.Beat(receipts=receipts(0)), 1.0)
    assert membership.answer("worker-0", ask_of(3, wait=True), 1.0) is None
    out = membership.lost("worker-1", "no sign of life", 0.0)
    left = only(out, LeftEvent)
    assert isinstance(left, LeftEvent)
    assert (left.lost, left.reason, left.epoch) == (True, "no sign of life", 2)
    assert membership.nodes.epoch == 2
    answer = membership.answer("worker-0", ask_of(3, wait=True), 2.0)
    assert isinstance(answer, v1.Assigned)
    assert list(answer.batches) == receipts(1, [1])
    assert not answer.complete
    assert membership.answer("worker-0", ask_of(3, wait=True), 3.0) == answer  # asked again
    assert membership.answer("worker-0", ask_of(4, wait=True), 3.0) is None
    out = membership.beat("worker-0", v1.Beat(receipts=receipts(1, [1]), finished=True), 2.0)
    assert [event.name for event in events(out)] == ["ledger", "finished"]
    assert events(out)[0].reassigned == 1  # type: ignore[attr-defined]
    assert isinstance(membership.answer("worker-1", ask_of(9), 3.0), Refuse)


@pytest.mark.parametrize(
    ("given", "who", "part"),
    [
        ({"survives": False}, "worker-1", "needs every worker"),
        ({}, "shard-0", "parameters are gone"),
        ({"workers": 1}, "worker-0", "no worker is left"),
    ],
)
def test_a_loss_that_cannot_be_survived_aborts_and_names_who(
    given: dict[str, object], who: str, part: str
) -> None:
    membership = gathered(**given)
    failed = only(membership.lost(who, "connection broken", 0.0), FailedEvent)
    assert isinstance(failed, FailedEvent)
    assert (failed.culprit, failed.error) == (who, "PeerLostError")
    assert "connection broken" in failed.message
    assert part in failed.message
    assert membership.notice.status == v1.Notice.ABORTED


def test_a_failure_aborts_any_strategy_with_its_traceback() -> None:
    membership = gathered()
    failure = v1.Failure(error="UserCodeError", message="worker-1 step 3", traceback="Traceback: mine")
    failed = only(membership.beat("worker-1", v1.Beat(failure=failure), 1.0), FailedEvent)
    assert failed == FailedEvent(
        culprit="worker-1", error="UserCodeError", message="worker-1 step 3", traceback="Traceback: mine"
    )
    assert not membership.beat("worker-0", v1.Beat(failure=failure), 1.0)


def test_workers_that_finish_without_receipts_end_the_run_with_an_error() -> None:
    membership = gathered()
    membership.beat("worker-0", v1.Beat(receipts=receipts(0), finished=True), 1.0)
    failed = only(membership.beat("worker-1", v1.Beat(finished=True), 1.0), FailedEvent)
    assert isinstance(failed, FailedEvent)
    assert "2 batches" in failed.message


def test_a_group_that_failed_without_a_loss_raises_the_epoch_once() -> None:
    """All its workers report it, some after the next group was formed; and a report from the future changes nothing."""
    membership = gathered()
    assert membership.nodes.epoch == 1
    reports = [("worker-0", 1), ("worker-1", 1), ("worker-0", 7)]
    told = [
        membership.beat(name, v1.Beat(reports=[v1.BeatReport(broken=epoch)]), 1.0) for name, epoch in reports
    ]
    assert [Notify() in out for out in told] == [True, False, False]
    assert membership.nodes.epoch == membership.notice.epoch == 2
    assert Notify() in membership.beat("worker-1", v1.Beat(reports=[v1.BeatReport(broken=2)]), 2.0)
    assert membership.nodes.epoch == 3 and membership.notice.status == v1.Notice.TRAINING


def test_a_further_worker_that_comes_before_all_others_waits_for_them() -> None:
    membership = make(stays="")
    further = f"worker-{membership.nodes.num_workers}"
    assert membership.join(ask(further), 0.0) == []
    for name in membership.nodes.missing:
        membership.join(ask(name), 0.0)
    assert not refusals(membership.join(ask(further), 0.0))
    assert refusals(make().join(ask(further), 0.0))
