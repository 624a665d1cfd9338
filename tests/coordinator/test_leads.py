"""The features of the coordinator: what the list of leads has to hold, and the order in which they hear."""

from __future__ import annotations

import pytest

from gradstream._version import __version__
from gradstream.coordinator import registry
from gradstream.coordinator.client.requests import Reporter
from gradstream.coordinator.lead import MOST_REPORTS, Emit, Instruction, Lead, Lost
from gradstream.coordinator.lifecycle import Lifecycle, LossTolerance
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import RefusedGradients
from gradstream.coordinator.registry import CoordinatorPlan, leads_of
from gradstream.coordinator.relay import RunClock
from gradstream.data.ledger import Ledger
from gradstream.data.plan import RoundPlan
from gradstream.errors import RefusedError
from gradstream.runtime import VirtualCluster
from gradstream.telemetry.events import Event, FailedEvent, StartedEvent
from gradstream.wire import v1

WITH_ALL = LossTolerance(survives_worker_loss=True, quorum=1, redoes=True, stands_in=True, skips_lost=True)


def plan(
    losses: LossTolerance = WITH_ALL,
) -> CoordinatorPlan:
    started = StartedEvent(
        job="j", workers=2, servers=1, strategy="synchronous", optimizer="sgd", num_parameters=0,
        num_samples=32, total_steps=8, in_rounds=True,
    )  # fmt: skip
    return CoordinatorPlan(started=started, ledger=Ledger(RoundPlan(32, 4, 2), epochs=2), losses=losses)


def test_each_kind_of_report_in_the_schema_has_one_lead() -> None:
    kinds = [kind for lead in leads_of(plan()) for kind in lead.REPORTS]
    assert sorted(kinds) == sorted(field.name for field in v1.BeatReport.DESCRIPTOR.oneofs[0].fields)


def test_a_report_of_a_feature_that_the_run_does_not_have_is_refused() -> None:
    membership = Membership(plan(LossTolerance(survives_worker_loss=True)))
    membership.nodes.add(v1.Node(name="worker-0", role="worker"))
    with pytest.raises(RefusedError, match="nobody takes in this run"):
        membership.check("worker-0", v1.Beat(reports=[v1.BeatReport(decision=v1.Decision())]))


class Hears(Lead):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_lost(self, lost: Lost, at_s: float) -> list[Instruction]:
        """Notes who is lost."""
        self.heard.append(f"lost {lost.worker}")
        return []

    def on_beat(self, node: v1.Node, beat: v1.Beat, at_s: float) -> list[Instruction]:
        """Notes who says something."""
        self.heard.append(node.name)
        return []


@pytest.mark.parametrize(
    ("survives", "heard"), [(True, ["worker-0", "lost worker-1"]), (False, ["worker-0"])]
)
def test_leads_behind_the_end_of_a_run_hear_no_more(
    survives: bool, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, made = Hears(), registry.leads_of
    monkeypatch.setattr("gradstream.coordinator.membership.leads_of", lambda plan: [*made(plan), own])
    membership = Membership(plan(LossTolerance(survives_worker_loss=survives)))
    spec = v1.ModelSpec(fingerprint=1, elems=64, dtype=v1.FLOAT32, chunk_elems=64)
    for name in ("shard-0", "worker-0", "worker-1"):
        role, _, rank = name.partition("-")
        node = v1.Node(name=name, role=role, rank=int(rank), address=f"{name}:1", incarnation=1)
        model = spec if role == "worker" else None
        membership.join(v1.Join(node=node, software=__version__, model=model), 0.0)
    membership.beat("worker-0", v1.Beat(), 1.0)
    events: list[Event] = [
        one.event for one in membership.lost("worker-1", "gone", 2.0) if isinstance(one, Emit)
    ]
    assert own.heard == heard
    assert any(isinstance(one, FailedEvent) for one in events) is not survives


def test_leads_are_found_by_their_class() -> None:
    membership = Membership(plan())
    assert membership.lead(Nodes) is membership.nodes and membership.lead(Lifecycle) is membership.life
    assert membership.find(Hears) is None


def gathering() -> Membership:
    """A run of which one worker is in, and the others are not."""
    membership = Membership(plan())
    membership.nodes.add(v1.Node(name="worker-0", role="worker"))
    membership.nodes.add(v1.Node(name="shard-0", role="shard"))
    return membership


def test_no_group_fails_before_training_begins() -> None:
    membership = gathering()
    beat = v1.Beat(reports=[v1.BeatReport(broken=0)])
    membership.check("worker-0", beat)
    membership.beat("worker-0", beat, 0.0)
    assert membership.nodes.epoch == 0


@pytest.mark.parametrize(
    ("who", "one"),
    [
        ("worker-0", v1.BeatReport(broken=1)),
        ("worker-0", v1.BeatReport(sound=True)),
        ("shard-0", v1.BeatReport(backed_up=1)),
    ],
)
def test_a_beat_has_one_report_of_a_kind_that_the_newest_replaces(who: str, one: v1.BeatReport) -> None:
    membership = gathering()
    membership.check(who, v1.Beat(reports=[one]))
    with pytest.raises(RefusedError, match="which has one at most"):
        membership.check(who, v1.Beat(reports=[one, one]))


def test_a_beat_has_so_many_reports_at_most() -> None:
    with pytest.raises(RefusedError, match="reports in a beat; expected at most"):
        gathering().check("worker-0", v1.Beat(reports=[v1.BeatReport()] * (MOST_REPORTS + 1)))


def test_reports_of_a_feature_are_taken_in_the_order_of_the_beat() -> None:
    membership = gathering()
    refused = v1.BeatReport(refused=v1.Refused(batch=v1.Receipt(), in_a_row=1))
    membership.beat("worker-0", v1.Beat(reports=[v1.BeatReport(sound=True), refused]), 0.0)
    assert membership.lead(RefusedGradients)._in_a_row == {"worker-0": 1}
    membership.beat("worker-0", v1.Beat(reports=[v1.BeatReport(sound=True)]), 0.0)
    assert membership.lead(RefusedGradients)._in_a_row == {}


def test_a_reporter_keeps_the_newest_of_such_a_kind() -> None:
    runtime = VirtualCluster(0).runtime("worker-0")
    reporter = Reporter("worker-0", RunClock(runtime, 0.0))
    for number in (1, 2):
        reporter.report(v1.BeatReport(broken=number), soon=False)
        reporter.report(v1.BeatReport(handed=v1.HandOver(rank=number)), soon=False)
    kinds = [report.WhichOneof("of") for report in reporter.beat.reports]
    assert kinds == ["handed", "broken", "handed"]
    assert reporter.beat.reports[1].broken == 2
