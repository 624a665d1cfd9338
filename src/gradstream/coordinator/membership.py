"""The membership of a run, as a pure state machine: what happened goes in, instructions come out.

    what happens ──▶ Membership ──▶ each lead, in the order of `registry` ──▶ instructions

It knows nodes, the minibatches in the model, and how far the run is. All else is led by `Lead`s, which it does not
name. Nothing here waits, sends or writes: the coordinator carries the instructions out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from gradstream.coordinator.admission import Admission
from gradstream.coordinator.lead import (
    ANY,
    MOST_REPORTS,
    OF_PARTS,
    OF_ROLE,
    ONCE,
    Emit,
    Instruction,
    Lead,
    Lost,
    Notify,
    Refuse,
    impossible,
)
from gradstream.coordinator.lifecycle import Lifecycle
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import SampleProgress, ref_of
from gradstream.coordinator.registry import CoordinatorPlan, leads_of
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.data.plan import unjoined
from gradstream.errors import PeerLostError, ReplicasDifferError
from gradstream.runtime.deadlines import to_wait_longer
from gradstream.telemetry.events import Event, JoinedEvent, LeftEvent
from gradstream.transport.limits import worker_rank
from gradstream.untrusted import escaped
from gradstream.wire import v1
from gradstream.wire.chunks import member_name

NAME_BYTES = 128
MESSAGE_BYTES = 8192
TRACEBACK_BYTES = 1 << 16
"""The most bytes that are kept of a member's failure: its name, message, traceback."""

NOTIFIED_OF_EACH = 64
"""Up to so many nodes, all members get a notice of each node that joins."""

L = TypeVar("L", bound=Lead)


class Membership:
    """The members of one run.

    Args:
        plan: what is to be led.

    Attributes:
        deadlines: those of the plan.
        leads: the features of the run, in the order in which they hear of what happens.
        nodes: the members.
        admission: the model as the workers have registered it.
        progress: the minibatches whose gradients the shards have applied.
        life: how far the run is: gathering, training, over.
    """

    def __init__(self, plan: CoordinatorPlan) -> None:
        self.deadlines = plan.deadlines
        self.leads = leads_of(plan)
        self.nodes = self.lead(Nodes)
        self.admission = self.lead(Admission)
        self.progress = self.lead(SampleProgress)
        self.life = self.lead(Lifecycle)
        self._of_kind = {kind: (lead, who) for lead in self.leads for kind, who in lead.REPORTS.items()}
        self._of_request = {kind: lead for lead in self.leads for kind in lead.REQUESTS.values()}
        self._started = plan.started
        self._opening = plan.opening

    def find(self, kind: type[L]) -> L | None:
        """Returns the lead of this class; None if the run has none."""
        return next((lead for lead in self.leads if isinstance(lead, kind)), None)

    def lead(self, kind: type[L]) -> L:
        """Returns the lead of this class, which every run has."""
        lead = self.find(kind)
        assert lead is not None
        return lead

    def parts(self) -> dict[str, object]:
        """The state machines whose state a new process of the coordinator takes over: see `durable.state`."""
        ledger = self.progress.ledger
        plan = unjoined(ledger.plan) if isinstance(ledger, Ledger) else ledger.dealing
        kept = {name: part for lead in self.leads for name, part in lead.durable().items()}
        return {**kept, "ledger": ledger, "plan": plan}

    def restored(self, at_s: float) -> list[Instruction]:
        """Goes on after the state of an earlier process of the coordinator was restored."""
        if not self.life.training:
            return []
        return [*(one for lead in self.leads for one in lead.restored(at_s)), *self.life.after_snapshot()]

    @property
    def notice(self) -> v1.Notice:
        """The present state, as all members get it."""
        notice = v1.Notice()
        for lead in self.leads:
            lead.notice(notice)
        return notice

    # ---- nodes --------------------------------------------------------------------------

    def join(self, request: v1.Join, at_s: float) -> list[Instruction]:
        """Admits a node, or returns `Refuse` as the only instruction; none if the node has to ask again later."""
        if request.boundary != self.life.boundary.number or self.life.next_boundary:
            text = f"{request.node.name} was built for another plan of the run: ask which one it is now"
            return [Refuse(v1.STALE_EPOCH, text)]
        if self.life.crossing and self.life.training:
            return []  # it joins after the boundary
        node = request.node
        if self.life.gathering and self.nodes.is_fresh(node) and self.progress.in_loops:
            self.nodes.gone |= {node.name}
            return []  # the state with which it begins is that of the others, once they train
        if self.life.gathering and self.nodes.is_further(node):
            return []  # a machine was quicker than those with which the run begins
        closed = self.nodes.expelled.get(node.name, "")
        if self.life.over or not self.nodes.awaits(node.name):
            closed = closed or self.life.why_closed(node.role)
        objection = self.admission.objection(request, closed)
        if objection is not None:
            return [objection]
        if self.life.training:
            return self._join_late(request, at_s) if node.role == "shard" or self._may_enter(node) else []
        self.admission.admit(request)
        begun = self._gathered(at_s)
        # Notices of each of n nodes to all others would hold n³ / 2 names.
        notified = begun or len(self.nodes.names) <= NOTIFIED_OF_EACH
        return [self._joined(node), *begun, Notify()] if notified else [self._joined(node)]

    def waits(self, at_s: float) -> list[Instruction]:
        """A node has to ask again later: after a boundary the others may begin without it."""
        return self._gathered(at_s) if self.life.gathering and self.life.boundary.resume else []

    def _may_enter(self, node: v1.Node) -> bool:
        """Whether a worker, or a part of its replica, may come in the place of a lost one now."""
        # The worker of a split replica comes last: a replica that is in is whole.
        whole = node.role != "worker" or not self.nodes.missing_parts(node.rank)
        return whole and self.life.may_enter and not any(lead.keeps_out for lead in self.leads)

    def _join_late(self, request: v1.Join, at_s: float) -> list[Instruction]:
        """Admits a node, or a new process of one, while workers train."""
        self.nodes.epoch += 1
        self.admission.admit(request)
        out: list[Instruction] = [self._joined(request.node)]
        for lead in self.leads:
            out += lead.on_join(request.node, at_s)
        return [*out, Notify()]

    def _joined(self, node: v1.Node) -> Emit:
        return Emit(JoinedEvent(who=node.name, address=node.address, epoch=self.nodes.epoch))

    def lost(self, who: str, reason: str, at_s: float, certificate: bytes = b"") -> list[Instruction]:
        """Removes a member: its stream broke, it was silent for too long, or it left.

        Its receipts stay valid. Other workers get the minibatches that it had no receipt for: at once, or when it is
        known which of them are in the model.

        Args:
            who: name of the member.
            reason: what happened to it.
            at_s: time in seconds.
            certificate: SHA-256 of the member's certificate, which no node accepts from now on; b"" without
                TLS.
        """
        node, over = self.nodes.remove(who), self.life.over
        if node is None:
            return []
        if certificate and self.nodes.epoch and not over:  # before the training, a lost node may join again
            self.nodes.revoked.append(certificate)
        lost = not over and who not in self.nodes.leaving
        reason = reason if lost else "" if over else "it was asked to go"
        left = LeftEvent(who=who, lost=lost, reason=reason, epoch=self.nodes.epoch)
        if over:
            return [Emit(left)]
        if self.life.gathering:
            return [Emit(left), Notify()]
        self.nodes.epoch += 1
        rest = [one for name in self.nodes.rest_of_replica(node) if (one := self.nodes.remove(name))]
        out: list[Instruction] = [Emit(replace(left, epoch=self.nodes.epoch))]
        out += [Emit(self._left_with(node, one.name)) for one in rest]
        worker = "" if node.role == "shard" else member_name(0, node.rank)
        gone = Lost(node, reason, worker, {one.name: one.incarnation for one in (node, *rest)})
        for lead in self.leads:
            out += lead.on_lost(gone, at_s)
            if self.life.over:
                return out
        out += [Notify(), *self.life.after_snapshot()]
        return [*out, *self._conclude(at_s)] if worker else out

    def _left_with(self, gone: v1.Node, who: str) -> LeftEvent:
        """Tells that another process of a lost one's replica is removed with it; it ends when it hears of that."""
        lost, reason = gone.name not in self.nodes.leaving, f"{gone.name} of its replica has left"
        return LeftEvent(who=who, lost=lost, reason=reason, epoch=self.nodes.epoch)

    def _gathered(self, at_s: float) -> list[Instruction]:
        """Begins the training if nobody else is waited for."""
        missing = self.nodes.missing
        if not missing:
            return self._begin(at_s)
        enough = self.nodes.gone.issuperset(missing) and self.life.can_begin
        return self._begin_without(missing, at_s) if enough else []

    def overdue(self, at_s: float) -> list[Instruction]:
        """Aborts a run in which nodes are missing when the deadline for joining has passed.

        After a boundary the training begins without workers that were lost there, if it can.
        """
        if not self.life.gathering:
            return []
        missing, there, join_s = self.nodes.missing, self.nodes.names, self.deadlines.join_s
        if self.life.boundary.resume and self.life.can_begin:
            return self._begin_without(missing, at_s)
        text = (
            f"did not join within {join_s:g} s: {', '.join(missing)} (in: {', '.join(there) or 'nobody'}). "
            "A worker joins when it has its data and its model, in a loop of your own at session.wrap: that takes "
            f"longer, or its process hangs; its log in the folder logs says where it is; {to_wait_longer('join_s')}"
        )
        return self.life.abort(missing[0], "DeadlineError", text)

    def _begin(self, at_s: float) -> list[Instruction]:
        """Begins the training, and reports what is trained, and from where."""
        self.life.status = v1.Notice.TRAINING
        self.progress.begin(at_s)
        self.nodes.begin()
        started, resumed = self.admission.with_model(self._started), self.progress.resumed()
        events = list[Event]()
        if not self.life.boundary.resume:
            events = [started] if resumed is None else [started, resumed]
        if self._opening is not None:
            samples = self.progress.num_samples if resumed is not None else 0
            events.append(replace(self._opening, optimizer=started.optimizer, samples=samples))
        return [*map(Emit, events), *(one for lead in self.leads for one in lead.on_begin(at_s))]

    def _begin_without(self, missing: list[str], at_s: float) -> list[Instruction]:
        """Begins the training without workers that were lost before the boundary, or may come later."""
        out, reason = self._begin(at_s), "it did not come back after the boundary"
        for who in missing:
            for lead in self.leads:
                out += lead.on_absent(int(who.rpartition("-")[2]))
            if who not in self.nodes.gone:  # these were reported when they were lost
                out.append(Emit(LeftEvent(who=who, lost=True, reason=reason, epoch=self.nodes.epoch)))
        return [*out, Notify()]

    def abandon(self, shard: str, waited_s: float) -> list[Instruction]:
        """Ends the run if a lost shard has not come back."""
        if self.life.over or self.nodes.get(shard) is not None:
            return []
        message = f"no new process of it has joined within {waited_s:g} s; {to_wait_longer('retry_s')}"
        return self.life.abort(shard, PeerLostError.__name__, message)

    # ---- reports --------------------------------------------------------------------------

    def check(self, who: str, beat: v1.Beat) -> None:
        """Raises RefusedError for an impossible beat. Call it before `beat`, which does not check."""
        node = self.nodes.get(who)
        if node is None or self.life.over:
            return
        if node.role != "worker" and (beat.receipts or beat.finished or beat.leaves):
            raise impossible(who, "only workers have receipts, finish, or are asked to go")
        culprit = beat.failure.culprit
        if culprit and (node.role != "shard" or worker_rank(culprit) is None):
            raise impossible(who, "only shards blame others for a failure, and they blame workers")
        for ref in map(ref_of, beat.receipts):
            if not self.progress.ledger.knows(ref, node.rank):
                raise impossible(who, f"a receipt for {ref}, which is no minibatch of this run")
        if len(beat.reports) > MOST_REPORTS:
            raise impossible(who, f"{len(beat.reports)} reports in a beat; expected at most {MOST_REPORTS}")
        seen = set[str]()
        for kind, report in _reports(beat):
            lead, senders = self._of_kind.get(kind, (None, ANY))
            if lead is None:
                raise impossible(who, f"a report {kind!r}, which nobody takes in this run")
            if senders not in OF_ROLE.get(node.role, OF_PARTS):
                raise impossible(who, f"a report {kind!r}; only {senders} send that")
            if kind in ONCE and kind in seen:
                raise impossible(who, f"two reports {kind!r} in a beat, which has one at most")
            seen.add(kind)
            lead.check(node, kind, report)

    def beat(self, who: str, beat: v1.Beat, at_s: float) -> list[Instruction]:
        """Takes what a member reports: each lead its own, then what follows from all of it."""
        node = self.nodes.get(who)
        if node is None or self.life.over:
            return []
        if beat.HasField("failure"):
            return self._failed(node, beat.failure, at_s)
        if beat.leaves:
            self.nodes.leaving.add(who)
        if beat.finished:
            self.nodes.finish(who, relies=beat.relies)
        news = self.progress.num_news
        out = self._take(node, beat, at_s)
        if not self.life.training:
            return out
        for lead in self.leads:
            out += lead.proceed(at_s)
        out += self.life.after_snapshot()
        news = self.progress.num_news - news
        if news or beat.finished:
            out += self._conclude(at_s)
            out += self.life.after_snapshot()
        if news:
            for lead in self.leads:
                out += lead.on_progress(at_s)
        return out

    def _failed(self, node: v1.Node, failure: v1.Failure, at_s: float) -> list[Instruction]:
        """Ends the run: a member cannot go on. A newcomer that could not begin, or differs, is lost alone."""
        ledger, could_not = self.progress.ledger, ""
        if node.role == "worker" and isinstance(ledger, OpenLedger) and not failure.culprit:
            differs = failure.error == ReplicasDifferError.__name__ and ledger.is_late(node.rank)
            could_not = "begin" if ledger.enters(node.rank) else "stay in step" if differs else ""
        if could_not:
            error = escaped(failure.error, NAME_BYTES)
            text = escaped(failure.message, MESSAGE_BYTES, newlines=True)
            return self.lost(node.name, f"it could not {could_not}: {error}: {text}", at_s)
        return self.life.abort(
            failure.culprit or node.name,
            escaped(failure.error, NAME_BYTES),
            escaped(failure.message, MESSAGE_BYTES, newlines=True),
            escaped(failure.traceback, TRACEBACK_BYTES, newlines=True),
        )

    def _take(self, node: v1.Node, beat: v1.Beat, at_s: float) -> list[Instruction]:
        """Gives each lead its reports, until the run is over."""
        out, reports = list[Instruction](), _reports(beat)
        for lead in self.leads:
            for kind, report in reports:
                if kind in lead.REPORTS:
                    out += lead.on_report(node, kind, report, at_s)
                    if self.life.over:
                        return out
            out += lead.on_beat(node, beat, at_s)
        return out

    # ---- requests of workers --------------------------------------------------------------

    def ask(self, who: str, request: Message, at_s: float) -> list[Instruction]:
        """Takes what a worker says with a request, once. Raises RefusedError for an impossible one."""
        node = self._worker(who)
        return (
            []
            if isinstance(node, Refuse)
            else list(self._of_request[type(request)].on_request(node, request, at_s))
        )

    def answer(self, who: str, request: Message, at_s: float) -> Message | Refuse | None:
        """Answers a request; None if that has to wait until something has happened."""
        node = self._worker(who)
        return (
            node if isinstance(node, Refuse) else self._of_request[type(request)].answer(node, request, at_s)
        )

    def _worker(self, who: str) -> v1.Node | Refuse:
        node = self.nodes.get(who)
        if node is None:
            return Refuse(v1.NOT_MEMBER, f"{who} is not a member in epoch {self.nodes.epoch}")
        if node.role != "worker":
            return Refuse(v1.BAD_REQUEST, f"{who} is no worker, and has no minibatches")
        return node

    # ---- events ---------------------------------------------------------------------------

    def event(self, event: Mapping[str, Any], at_s: float) -> list[Instruction]:
        """Takes an event of a member, as it is in `events.jsonl`, before the beat that it came with."""
        return [one for lead in self.leads for one in lead.on_event(event, at_s)]

    def _conclude(self, at_s: float) -> list[Instruction]:
        """Ends the run, or this plan of it, if everything is done."""
        out: list[Instruction] = []
        if self.progress.ledger.finished and not self.life.over:
            for lead in self.leads:
                out += lead.on_complete()
        return [*out, *self.life.conclude(at_s)]


def _reports(beat: v1.Beat) -> list[tuple[str, Any]]:
    """The reports of a beat with their kinds, in order. A kind that this program does not know is "unknown"."""
    kinds = [(report, report.WhichOneof("of")) for report in beat.reports]
    return [(kind, getattr(report, kind)) if kind else ("unknown", None) for report, kind in kinds]
