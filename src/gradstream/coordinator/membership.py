"""The membership of a run, as a pure state machine: what happened goes in, instructions come out.

    what happens ──▶ Membership ──▶ instructions
                         ├── `nodes.py`               which nodes are in, under which epoch; refused gradients
                         ├── `admission.py`           which nodes may join, and the beginning of the training
                         ├── `progress.py`            what is in the model
                         ├── `estates.py`             what lost workers had pushed without a receipt
                         ├── `participation.py`       which workers take part
                         ├── `snapshot_rounds.py`     checkpoints
                         ├── `resharding.py`          other shards for the parameters
                         ├── `phases.py`              the phase of the run, and its end
                         └── `assignment_replies.py`  answers to workers that ask what to do

Nothing here waits, sends or writes: the coordinator carries the instructions out.
"""

from __future__ import annotations

from dataclasses import replace

from gradstream.checkpoint.manifest import Resume
from gradstream.checkpoint.policy import Policy
from gradstream.coordinator.admission import Admission, Gathering, LeftOut, StandIns
from gradstream.coordinator.assignment_replies import AssignmentReplies, BatchDistribution
from gradstream.coordinator.estates import Estates
from gradstream.coordinator.message_checks import MessageChecks
from gradstream.coordinator.nodes import Emit, Instruction, Nodes, Notify, Offences, Refuse
from gradstream.coordinator.phases import WHOLE, JobStretch, LossTolerance, Phases
from gradstream.coordinator.progress import SampleProgress, ref_of
from gradstream.coordinator.resharding import Resharding
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.data.joined import unjoined
from gradstream.data.ledger import Ledger
from gradstream.errors import ConfigError, NonFiniteError, PeerLostError
from gradstream.runtime.deadlines import Deadlines, to_wait_longer
from gradstream.telemetry.events import (
    BackedUpEvent,
    JoinedEvent,
    LeftEvent,
    ParticipationEvent,
    StartedEvent,
)
from gradstream.untrusted import escaped
from gradstream.wire import v1
from gradstream.wire.chunks import member_name

NAME_BYTES = 128
MESSAGE_BYTES = 8192
TRACEBACK_BYTES = 1 << 16
"""The most bytes that are kept of a member's failure: its name, message, traceback."""

GROWS_BEFORE = 8
"""Steps of each worker that have to be left for a boundary at which batches grow."""

NOTIFIED_OF_EACH = 64
"""Up to so many nodes, all members get a notice of each node that joins."""


class Membership:
    """The members of one run.

    Args:
        started: the run as planned; `workers` and `servers` say which nodes are expected. The registered
            model fills in `num_parameters` and `chunk_elems`.
        distribution: how the minibatches reach the workers.
        losses: which lost nodes the run survives.
        policy: when checkpoints are made; None makes none, not even when the run is stopped.
        deadlines: among others, how long workers may be paused while a snapshot for a checkpoint is taken.
        resume: the checkpoint from which a resumed run continues; None for a new run.
        parts: number of processes of each worker's replica; if one is lost, all of them are replaced.
        stretch: which part of the run this is, if its job has phases.

    Attributes:
        deadlines: see above.
        nodes: the members.
        admission: the model as the workers have registered it.
        progress: the minibatches whose gradients the shards have applied.
        snapshots: checkpoints.
        resharding: the change to other shards.
        phases: how far the run is: gathering, training, over.
        replies: answers to workers that ask what to do.
        balance: how many samples of a round each worker takes, by measured speed; None if that is planned.
        participation: which workers take part; None if all do.
        estates: of each lost worker, the minibatches that it had pushed and not reported; None if other workers
            compute all of them again.
        stand_ins: which worker computes a lost worker's share of each round; None if nobody does.
        left_out: drops that share instead, where rounds go on without it; None if they do not.
    """

    def __init__(
        self,
        started: StartedEvent,
        distribution: BatchDistribution,
        losses: LossTolerance,
        *,
        policy: Policy | None = None,
        deadlines: Deadlines | None = None,
        resume: Resume | None = None,
        parts: int = 1,
        stretch: JobStretch = WHOLE,
    ) -> None:
        ledger, by_verdicts = distribution.ledger, losses.quorum is not None
        self.deadlines = deadlines or Deadlines()
        self.balance = distribution.balance
        self.participation = distribution.participation
        alike = losses.regroups and losses.stands_in
        self.nodes = Nodes(started.workers, started.servers, parts, stretch.before, alike=alike)
        self.admission = Admission(self.nodes, resume)
        self.progress = SampleProgress(ledger, started.num_samples, resume, in_rounds=started.in_rounds)
        self.estates = Estates(ledger, self.nodes) if losses.redoes and isinstance(ledger, Ledger) else None
        self.snapshots = SnapshotRounds(
            self.progress,
            self.nodes,
            policy,
            deadlines=self.deadlines,
            verdicts=by_verdicts,
            estates=self.estates,
        )
        self.resharding = Resharding(
            self.nodes,
            self.snapshots,
            self.estates,
            self.deadlines,
            obstacle=losses.keeps_shards,
            fewest=2 if losses.acknowledge == "replicated" else 1,
        )
        self.phases = Phases(
            started, self.nodes, self.progress, self.snapshots, self.participation, losses, stretch
        )
        self.stand_ins = StandIns(self.nodes, hands_over=not losses.regroups) if losses.stands_in else None
        self.left_out = LeftOut(ledger) if losses.leaves_out and isinstance(ledger, Ledger) else None
        self._gathering = Gathering(
            started,
            self.nodes,
            self.admission,
            self.progress,
            self.phases,
            self.stand_ins,
            self.participation,
            self.deadlines.join_s,
        )
        first_round = resume.rounds if resume is not None else 0
        self._checks = MessageChecks(ledger, started.workers, first_round=first_round, quorum=by_verdicts)
        self._offences = Offences(
            self.progress,
            losses.quarantine_after,
            whole_rounds=started.in_rounds and not started.servers and not losses.leaves_out,
        )
        self.replies = AssignmentReplies(distribution, self.nodes, self.phases, self.snapshots, self._checks)

    def parts(self) -> dict[str, object]:
        """The state machines whose state a new process of the coordinator takes over: see `durable.state`."""
        ledger = self.progress.ledger
        parts: dict[str, object | None] = {
            "nodes": self.nodes,
            "admission": self.admission,
            "progress": self.progress,
            "ledger": ledger,
            "snapshots": self.snapshots,
            "resharding": self.resharding,
            "phases": self.phases,
            "offences": self._offences,
            "replies": self.replies,
            "assignment": self.replies.assignment,
            "balance": self.balance,
            "participation": self.participation,
            "stand_ins": self.stand_ins,
            "left_out": self.left_out,
            "estates": self.estates,
            "plan": unjoined(ledger.plan) if isinstance(ledger, Ledger) else ledger.reassignment,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def restored(self, at_s: float) -> list[Instruction]:
        """Goes on after the state of an earlier process of the coordinator was restored."""
        return [] if not self.phases.training else [*self.snapshots.restored(at_s), *self.after_snapshot()]

    @property
    def notice(self) -> v1.Notice:
        """The present state, as all members get it."""
        return v1.Notice(
            epoch=self.nodes.epoch,
            nodes=self.nodes.as_notice(),
            model=self.admission.model,
            phase=self.phases.phase,
            reason=self.phases.reason,
            culprit=self.phases.culprit,
            snapshot=None if self.snapshots.current is None else self.snapshots.current.as_notice(),
            placement=self.nodes.placement.as_message(),
            resharding=self.resharding.as_notice(),
            participation=None if self.participation is None else self.participation.as_notice(),
            revoked=self.nodes.revoked,
            fenced=() if self.estates is None else self.estates.as_notice(),
            stand_ins=() if self.stand_ins is None else self.stand_ins.as_notice(),
            first_epoch=self.nodes.first_epoch,
            next_stretch=self.phases.next_stretch,
        )

    # ---- nodes --------------------------------------------------------------------------

    def join(self, request: v1.Join, at_s: float) -> list[Instruction]:
        """Admits a node, or returns `Refuse` as the only instruction; none if the node has to ask again later."""
        if request.stretch != self.phases.stretch.number or self.phases.next_stretch:
            text = f"{request.node.name} was built for another phase of the job: ask which one it is now"
            return [Refuse(v1.STALE_EPOCH, text)]
        if self.phases.crossing and self.phases.training:
            return []  # it joins the next phase
        closed = self._offences.reason(request.node.name)
        if self.phases.over or not self.resharding.awaits(request.node.name):
            closed = closed or self.phases.why_closed(request.node.role)
        objection = self.admission.objection(request, closed)
        if objection is not None:
            return [objection]
        if self.phases.training and request.node.role == "shard":
            return [*self._come_back(request), *self.resharding.proceed(at_s)]
        if self.phases.training:
            may_enter = self.phases.may_enter and not self.nodes.handing_over
            # The worker of a split replica comes last: a replica that is in is whole.
            whole = request.node.role != "worker" or not self.nodes.missing_parts(request.node.rank)
            return self._replace(request) if may_enter and whole else []
        self.admission.admit(request)
        begun = self._gathering.proceed(at_s)
        node = request.node
        joined = Emit(JoinedEvent(who=node.name, address=node.address, epoch=self.nodes.epoch))
        # Notices of each of n nodes to all others would hold n³ / 2 names.
        notified = begun or len(self.nodes.names) <= NOTIFIED_OF_EACH
        return [joined, *begun, Notify()] if notified else [joined]

    def _replace(self, request: v1.Join) -> list[Instruction]:
        """Admits a worker in the place of a lost one, or a part of its replica, while the others train."""
        node = request.node
        if node.role != "worker":
            return self._come_back(request)
        self.nodes.epoch += 1
        self.admission.admit(request)
        assert isinstance(self.progress.ledger, Ledger)  # `LossTolerance.replaces`
        self.progress.ledger.hands.rejoined(node.rank)
        self.replies.joined(node)
        if self.stand_ins is not None:
            self.stand_ins.joined(node)
        if self.left_out is not None:
            self.left_out.joined(node.rank)
        joined = Emit(JoinedEvent(who=node.name, address=node.address, epoch=self.nodes.epoch))
        if self.participation is not None and self.participation.joined(node.name):
            return [joined, *self._participation_changed()]
        return [joined, Notify()]

    def _come_back(self, request: v1.Join) -> list[Instruction]:
        """Admits a new shard, or a new process of one, or of a part of a replica, that was lost while workers train."""
        self.nodes.epoch += 1
        self.admission.admit(request)
        node = request.node
        return [Emit(JoinedEvent(who=node.name, address=node.address, epoch=self.nodes.epoch)), Notify()]

    def check(self, who: str, beat: v1.Beat) -> None:
        """Raises RefusedError for an impossible beat. Call it before `beat`, which does not check."""
        node = self.nodes.get(who)
        if node is not None and not self.phases.over:
            self._checks.beat(node, beat)

    def beat(self, who: str, beat: v1.Beat, at_s: float) -> list[Instruction]:
        """Takes the reports of a member: receipts, that its strategy is done, that it failed."""
        node = self.nodes.get(who)
        if node is None or self.phases.over:
            return []
        if beat.HasField("failure"):
            failure = beat.failure
            return self.phases.abort(
                failure.culprit or who,
                escaped(failure.error, NAME_BYTES),
                escaped(failure.message, MESSAGE_BYTES, newlines=True),
                escaped(failure.traceback, TRACEBACK_BYTES, newlines=True),
            )
        self.progress.begun(beat.begun, node.rank)
        out = self._gradients(who, beat)
        if self.phases.phase == v1.Notice.ABORTED:
            return out
        self.progress.receipts(beat.receipts, node.rank, at_s)
        self._account_for_lost(node, beat)
        out += self._handed(who, beat)
        if (
            beat.quiesced
            and self.participation is not None
            and self.participation.quiesced(who, beat.quiesced)
        ):
            out.append(Notify())
        for verdict in beat.verdicts:
            round_ = self.progress.verdict(verdict.round, list(verdict.ranks), at_s)
            out += [] if round_ is None else [Emit(round_)]
        settled = self._settle(who, beat, at_s)
        out += settled
        out += self._note(who, beat)
        for report in beat.snapshots:
            out += self.snapshots.report(who, report, at_s)
        if beat.HasField("resharded"):
            out += self.resharding.report(who, beat.resharded, at_s)
        if self.phases.training:
            # In this order: where every snapshot is due at once, the shards would never change.
            out += [*self.resharding.proceed(at_s), *self.snapshots.tick(at_s)]
        out += self.after_snapshot()
        if beat.receipts or beat.verdicts or beat.finished or settled:
            out += self.phases.conclude(at_s)
            out += self.after_snapshot()
        return out

    def _account_for_lost(self, node: v1.Node, beat: v1.Beat) -> None:
        """Accounts for the parts of lost workers in rounds that a member has gone through."""
        news = bool(beat.receipts or beat.finished)
        if self.stand_ins is not None:
            if news:
                self.stand_ins.heard(node.name)
            self.stand_ins.settle(self.progress.ledger)
        if self.left_out is not None and news:
            self.left_out.heard(node.rank, map(ref_of, beat.receipts), finished=beat.finished)

    def _note(self, who: str, beat: v1.Beat) -> list[Instruction]:
        """Takes what a member says of itself."""
        if beat.leaves:
            self.nodes.leaving.add(who)
        if beat.finished:
            self.nodes.finish(who, relies=beat.relies)
        if beat.broken and beat.broken == self.nodes.epoch and self.phases.training:
            self.nodes.epoch += 1  # under which the same workers form another group
            return [Notify()]
        if not beat.backed_up:
            return []
        self.nodes.backed_up[who] = beat.backed_up
        return [Emit(BackedUpEvent(who=who))] if self.nodes.is_backed_up(who) else []

    def _settle(self, who: str, beat: v1.Beat, at_s: float) -> list[Instruction]:
        """Takes what is known of the pushes of lost workers; a snapshot waits for that."""
        if self.estates is None:
            self.progress.pushed(who, beat.estates, self.nodes.num_servers)
            return []
        out = [one for report in beat.estates for one in self.estates.report(who, report)]
        out += [one for done in beat.redone for one in self.estates.redone(who, done)]
        if out:
            self.progress.heard(at_s)
        return out + self.snapshots.proceed(at_s) if out else out

    def _handed(self, who: str, beat: v1.Beat) -> list[Instruction]:
        """Lets newcomers begin to whom their stand-in has handed over, or who have come too late for any round."""
        if self.stand_ins is None:
            return []
        begin = [self.stand_ins.handed_over(who, handed) for handed in beat.handed]
        ledger = self.progress.ledger
        if ledger.finished and isinstance(ledger, Ledger):
            begin.append(self.stand_ins.at_end(self.progress.last_version(self.nodes.num_workers)))
        return [Notify()] if any(begin) else []

    def _gradients(self, who: str, beat: v1.Beat) -> list[Instruction]:
        """Counts the gradients of a worker that are not in the model; ends the run where no worker has another one."""
        out, diverged = self._offences.heard(who, beat, self.nodes.worker_names)
        end = self.phases.abort(who, NonFiniteError.__name__, diverged) if diverged else []
        return [*out, *end]

    def quarantined(self, who: str) -> str:
        """Why a member counts as lost from now on, although it lives; "" if it does not."""
        return "" if self.phases.over else self._offences.reason(who)

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
        node, over = self.nodes.remove(who), self.phases.over
        if node is None:
            return []
        if certificate and self.nodes.epoch and not over:  # before the training, a lost node may join again
            self.nodes.revoked.append(certificate)
        lost = not over and who not in self.nodes.leaving
        reason = reason if lost else "" if over else "it was asked to go"
        left = LeftEvent(who=who, lost=lost, reason=reason, epoch=self.nodes.epoch)
        if over:
            return [Emit(left)]
        if self.phases.gathering:
            return [Emit(left), Notify()]
        self.nodes.epoch += 1
        rest = [one for name in self.nodes.rest_of_replica(node) if (one := self.nodes.remove(name))]
        out: list[Instruction] = [Emit(replace(left, epoch=self.nodes.epoch))]
        out += [Emit(self._left_with(node, one.name)) for one in rest]
        out += self.resharding.lost(who, at_s)
        if node.role == "shard" and node.rank not in self.nodes.placement:
            return [*out, Notify()]  # it holds no parameters
        hopeless = self.phases.why_hopeless(node)
        if hopeless:
            kind = NonFiniteError if self._offences.reason(who) else PeerLostError
            return out + self.phases.abort(who, kind.__name__, f"{reason}; {hopeless}")
        if node.role == "shard":
            return [*out, Notify(), *self.snapshots.lost(who, at_s), *self.after_snapshot()]
        who = member_name(0, node.rank)
        if self.estates is None or who in self.nodes.leaving:
            self.progress.ledger.lost(node.rank)
        if self.estates is not None:
            self.estates.lost(node.rank, {one.name: one.incarnation for one in (node, *rest)})
        if self.stand_ins is not None:
            self.stand_ins.lost(node.rank)
            self.stand_ins.settle(self.progress.ledger)
        if self.left_out is not None:
            self.left_out.lost(node.rank)
        replaced = self.participation is not None and self.participation.lost(who)
        out += self._participation_changed() if replaced else [Notify()]
        out += self.snapshots.lost(who, at_s)
        return out + self.after_snapshot() + self.replies.rebalance() + self.phases.conclude(at_s)

    def _left_with(self, gone: v1.Node, who: str) -> LeftEvent:
        """Tells that another process of a lost one's replica is removed with it; it ends when it hears of that."""
        lost, reason = gone.name not in self.nodes.leaving, f"{gone.name} of its replica has left"
        return LeftEvent(who=who, lost=lost, reason=reason, epoch=self.nodes.epoch)

    def overdue(self, at_s: float) -> list[Instruction]:
        """Aborts a run in which nodes are missing when the deadline for joining has passed.

        A phase of the job that follows another begins without workers that were lost at the boundary, if it can.
        """
        return self._gathering.overdue(at_s) if self.phases.gathering else []

    def abandon(self, shard: str, waited_s: float) -> list[Instruction]:
        """Ends the run if a lost shard has not come back."""
        if self.phases.over or self.nodes.get(shard) is not None:
            return []
        message = f"no new process of it has joined within {waited_s:g} s; {to_wait_longer('retry_s')}"
        return self.phases.abort(shard, PeerLostError.__name__, message)

    # ---- requests about the run -----------------------------------------------------------

    def stop(self, at_s: float) -> list[Instruction]:
        """Stops the run on request, with a snapshot if training has begun. Repeating it changes nothing."""
        if self.phases.over or self.phases.asked:
            return []
        self.phases.asked = True
        if self.phases.gathering:
            return self.phases.stop()
        if self.snapshots.stopping:  # with the checkpoint at the end of this phase of the job
            return []
        return self.snapshots.stop(at_s) + self.after_snapshot()

    def reshard(self, servers: int, token: str, at_s: float) -> list[Instruction]:
        """Changes the number of shards. Raises ConfigError if the run cannot do that, or not now."""
        if not self.phases.training:
            raise ConfigError(f"reshard: servers={servers}: the run is not training; ask again when it is")
        return self.resharding.begin(servers, token, at_s)

    def finish(self, reason: str, at_s: float) -> list[Instruction]:
        """Finishes the run early, with the minibatches that workers have begun. Repeating it changes nothing."""
        if not self.phases.training or self.snapshots.stopping or self.snapshots.finishing:
            return []
        self.phases.criterion = reason
        return self.snapshots.finish(at_s)

    def cross(self, reason: str, at_s: float) -> list[Instruction]:
        """Ends this phase of the job, or the run with it, before its epochs or steps do: see `finish`."""
        if not self.phases.stretch.follows:
            return self.finish(reason, at_s)
        if not self.phases.training or self.phases.crossing:
            return []
        self.phases.criterion = reason
        return self.phases.cross(at_s) + self.after_snapshot()

    def grow(self, accumulate: int, at_s: float) -> list[Instruction]:
        """Lets this phase of the job go on with more minibatches of a step, if enough of it is left."""
        ledger = self.progress.ledger
        if not self.phases.training or self.phases.crossing or not isinstance(ledger, Ledger):
            return []
        if ledger.finished:
            return []
        left = ledger.num_planned - ledger.num_receipts
        return self.phases.cross(at_s, accumulate) if left > GROWS_BEFORE * self.nodes.num_workers else []

    def set_active_workers(self, count: int, phase: str) -> list[Instruction]:
        """Sets how many workers take part from now on, and the strategy's word for that phase."""
        if self.participation is None or not self.phases.training:
            return []
        self.participation.set_active_workers(count, phase)
        return self._participation_changed()

    def participation_failed(self, error: str, message: str, traceback: str) -> list[Instruction]:
        """Aborts the run: the strategy's `drive` has failed."""
        return [] if self.phases.over else self.phases.abort("coordinator", error, message, traceback)

    # ---- consequences ---------------------------------------------------------------------

    def after_snapshot(self) -> list[Instruction]:
        """Stops the run if that is what the latest snapshot was made for."""
        return self.phases.stop() if self.snapshots.stopped and not self.phases.over else []

    def _participation_changed(self) -> list[Instruction]:
        """Reports which workers take part now."""
        assert self.participation is not None
        event = ParticipationEvent(
            phase=self.participation.phase,
            active=self.participation.active,
            paused=self.participation.paused,
            samples=self.progress.num_samples,
        )
        return [Emit(event), Notify()]
