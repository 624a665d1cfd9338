"""Who is in the run, as a pure state machine: what happened goes in, instructions come out.

    what happens ──▶ Membership ──▶ instructions
                         ├── `nodes.py`       who is in, under which epoch
                         ├── `admission.py`   who may come in
                         ├── `progress.py`       what is in the model
                         ├── `participation.py`       who takes part
                         ├── `snapshot.py`         checkpoints
                         ├── `phases.py`      how the run stands, and ends
                         └── `assignment_replies.py`  what workers are told that ask

Nothing here waits, sends or writes: the coordinator carries the instructions out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradstream.checkpoint.folder import VectorPlace
from gradstream.checkpoint.manifest import Resume
from gradstream.checkpoint.policy import Policy
from gradstream.coordinator.admission import Admission
from gradstream.coordinator.assignment import BatchAssignment
from gradstream.coordinator.assignment_replies import AssignmentReplies
from gradstream.coordinator.balance import ShareBalance
from gradstream.coordinator.claims import Claims
from gradstream.coordinator.instructions import Emit, Instruction, Notify
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.participation import ParticipationSchedule
from gradstream.coordinator.phases import Phases
from gradstream.coordinator.progress import SampleProgress
from gradstream.coordinator.snapshot import Snapshot, SnapshotLimits, SnapshotRounds
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.telemetry.events import JoinedEvent, LeftEvent, ParticipationEvent, StartedEvent
from gradstream.untrusted import escaped
from gradstream.wire import v1

__all__ = ["Membership"]

NAME_BYTES = 128
MESSAGE_BYTES = 8192
TRACEBACK_BYTES = 1 << 16
"""Of what a member says about its failure."""

TOLD_OF_EACH = 64
"""While so many nodes have joined at most, they hear of each that does."""


class Membership:
    """The members of one run.

    Args:
        started: the run as planned; `workers` and `servers` say who is expected. Its
            `num_parameters` and `chunk_elems` are filled in from the registered model.
        ledger: which batches are in the model.
        survives_worker_loss: the strategy goes on without a lost worker, which needs its
            batches to be taken over by others.
        software: version of gradstream that every node must have.
        policy: when checkpoints are made; None makes none, not even when the run is stopped.
        together: workers go through rounds, and stop after the same one.
        resume: where the run goes on, if it does not begin.
        limits: deadlines of a snapshot.
        quorum: so many contributions make an update, and so many workers are needed; None leaves it to
            `survives_worker_loss`. Verdicts then tell what is in the model, and receipts do not.
        balance: decides the shares of a round by measured speed; None leaves them as they are.
        assignment: hands out minibatches to workers that ask; None where they go through rounds, or bring
            data of their own.
        participation: who takes part, where the strategy says so; None for all, from the begin.
        allow_lost: see `Phases`.

    Attributes:
        nodes: who is in.
        admission: what the workers have registered of the model.
        progress: what is in the model.
        snapshots: checkpoints.
        phases: how the run stands.
        replies: what workers are told that ask.
    """

    def __init__(
        self,
        started: StartedEvent,
        ledger: Ledger | OpenLedger,
        *,
        survives_worker_loss: bool,
        software: str,
        policy: Policy | None = None,
        together: bool = False,
        resume: Resume | None = None,
        limits: SnapshotLimits | None = None,
        balance: ShareBalance | None = None,
        assignment: BatchAssignment | None = None,
        quorum: int | None = None,
        participation: ParticipationSchedule | None = None,
        allow_lost: bool = False,
    ) -> None:
        self._started = started
        self.balance = balance
        self.participation = participation
        self.nodes = Nodes(started.workers, started.servers)
        self.admission = Admission(self.nodes, software, resume)
        self.progress = SampleProgress(ledger, started.num_samples, resume)
        self.snapshots = SnapshotRounds(
            ledger,
            policy or Policy(),
            together=together,
            resume=resume,
            limits=limits,
            enabled=policy is not None,
            verdicts=quorum is not None,
        )
        self.phases = Phases(
            started,
            self.nodes,
            self.progress,
            self.snapshots,
            participation,
            survives_worker_loss=survives_worker_loss,
            quorum=quorum,
            allow_lost=allow_lost,
        )
        first_round = resume.rounds if resume is not None else 0
        self._claims = Claims(ledger, started.workers, first_round=first_round, quorum=quorum is not None)
        self.replies = AssignmentReplies(
            ledger, self.nodes, self.phases, self.snapshots, balance, assignment, participation, self._claims
        )

    @property
    def notice(self) -> v1.Notice:
        """The present state, as every member is told it."""
        return v1.Notice(
            epoch=self.nodes.epoch,
            nodes=self.nodes.as_notice(),
            model=self.admission.model,
            phase=self.phases.phase,
            reason=self.phases.reason,
            culprit=self.phases.culprit,
            snapshot=None if self.snapshots.current is None else self.snapshots.current.as_notice(),
            participation=None if self.participation is None else self.participation.as_notice(),
            revoked=self.nodes.revoked,
        )

    # ---- nodes --------------------------------------------------------------------------

    def join(self, request: v1.Join, at_s: float) -> list[Instruction]:
        """A node asks to be in. Either the only instruction is `Refuse`, or it is in."""
        objection = self.admission.objection(request, gathering=self.phases.gathering)
        if objection is not None:
            return [objection]
        self.admission.admit(request)
        out = [] if self.nodes.missing else self._begin(at_s)
        node = request.node
        joined = JoinedEvent(who=node.name, address=node.address, epoch=self.nodes.epoch)
        # Of many nodes, who waits for the others is not told of each: that were n³ / 2 names.
        told = out or len(self.nodes.names) <= TOLD_OF_EACH
        return [Emit(joined), *out, Notify()] if told else [Emit(joined)]

    def check(self, who: str, beat: v1.Beat) -> None:
        """Raises RefusedError for a beat that says what cannot be. Ask before `beat`, which believes it."""
        node = self.nodes.get(who)
        if node is not None and not self.phases.over:
            self._claims.check_beat(node, beat)

    def beat(self, who: str, beat: v1.Beat, at_s: float) -> list[Instruction]:
        """A member says what it has done: receipts, that its strategy is done, that it failed."""
        node = self.nodes.get(who)
        if node is None or self.phases.over:
            return []
        if beat.HasField("failure"):
            failure = beat.failure
            return self.phases.abort(
                who,
                escaped(failure.error, NAME_BYTES),
                escaped(failure.message, MESSAGE_BYTES, newlines=True),
                escaped(failure.traceback, TRACEBACK_BYTES, newlines=True),
            )
        self.progress.begun(beat.begun, node.rank)
        self.progress.receipts(beat.receipts, node.rank, at_s)
        out: list[Instruction] = []
        if (
            beat.quiesced
            and self.participation is not None
            and self.participation.quiesced(who, beat.quiesced)
        ):
            out.append(Notify())
        for verdict in beat.verdicts:
            round_ = self.progress.verdict(verdict.round, list(verdict.ranks), at_s)
            out += [] if round_ is None else [Emit(round_)]
        if beat.finished:
            self.nodes.finish(who, relies=beat.relies)
        for report in beat.snapshots:
            out += self.snapshots.report(who, report, at_s)
        if self.phases.training:
            out += self.snapshots.tick(at_s, *self._names)
        out += self._after_snapshot()
        if beat.receipts or beat.verdicts or beat.finished:
            out += self.phases.conclude()
        return out

    def lost(self, who: str, reason: str, at_s: float, certificate: bytes = b"") -> list[Instruction]:
        """A member is gone: its stream broke, it was silent for too long, or it left.

        Its receipts stand. Minibatches that it had without one are handed out again.

        Args:
            certificate: SHA-256 of that of the member, which nobody accepts any more; b"" without TLS.
        """
        node, over = self.nodes.remove(who), self.phases.over
        if node is None:
            return []
        if certificate and self.nodes.epoch and not over:  # who is lost before it begins may come again
            self.nodes.revoked.append(certificate)
        left = LeftEvent(who=who, lost=not over, reason="" if over else reason, epoch=self.nodes.epoch)
        if over:
            return [Emit(left)]
        if self.phases.gathering:
            return [Emit(left), Notify()]
        self.nodes.epoch += 1
        out: list[Instruction] = [Emit(replace(left, epoch=self.nodes.epoch))]
        hopeless = self.phases.why_hopeless(node)
        if hopeless:
            return out + self.phases.abort(who, "PeerLostError", f"{reason}; {hopeless}")
        self.progress.ledger.lost(node.rank)
        replaced = self.participation is not None and self.participation.lost(who)
        out += self._participation_changed() if replaced else [Notify()]
        out += self.snapshots.lost(who, at_s, *self._names)
        return out + self._after_snapshot() + self.replies.rebalance() + self.phases.conclude()

    def overdue(self) -> list[Instruction]:
        """The deadline for joining has passed."""
        if not self.phases.gathering:
            return []
        missing, there = self.nodes.missing, self.nodes.names
        text = (
            f"did not join in time: {', '.join(missing)} (in: {', '.join(there) or 'nobody'}); see their logs"
        )
        return self.phases.abort(missing[0], "DeadlineError", text)

    # ---- what the run is to do ----------------------------------------------------------

    def stop(self, at_s: float) -> list[Instruction]:
        """Somebody asks the run to stop: with a snapshot, if it has begun. Asking again changes nothing."""
        if self.phases.over or self.snapshots.stopping:
            return []
        if self.phases.gathering:
            return self.phases.stop()
        return self.snapshots.stop(at_s, *self._names) + self._after_snapshot()

    def finish(self, reason: str, at_s: float) -> list[Instruction]:
        """The run has done enough. It finishes with what workers have begun; asking again changes nothing."""
        if not self.phases.training or self.snapshots.stopping or self.snapshots.finishing:
            return []
        self.phases.criterion = reason
        return self.snapshots.finish(at_s, *self._names)

    def set_active_workers(self, count: int, phase: str) -> list[Instruction]:
        """The strategy says how many workers take part from now on, and what it calls that."""
        if self.participation is None or not self.phases.training:
            return []
        self.participation.set_active_workers(count, phase)
        return self._participation_changed()

    def participation_failed(self, error: str, message: str, traceback: str) -> list[Instruction]:
        """The strategy cannot say who takes part any more."""
        return [] if self.phases.over else self.phases.abort("coordinator", error, message, traceback)

    # ---- snapshots ---------------------------------------------------------------------------

    def prepared(self, snapshot: Snapshot, places: Sequence[VectorPlace], at_s: float) -> list[Instruction]:
        """See `SnapshotRounds.prepared`."""
        return self.snapshots.prepared(snapshot, places, at_s) + self._after_snapshot()

    def committed(self, snapshot: Snapshot, folder: str, size_bytes: int, at_s: float) -> list[Instruction]:
        """See `SnapshotRounds.committed`."""
        return (
            self.snapshots.committed(snapshot, folder, size_bytes, at_s, *self._names)
            + self._after_snapshot()
        )

    def snapshot_failed(self, snapshot: Snapshot, who: str, why: str, at_s: float) -> list[Instruction]:
        """The coordinator could not open or commit a draft."""
        if snapshot is not self.snapshots.current:
            return []
        return self.snapshots.fail(who, why, at_s) + self._after_snapshot()

    # ---- what follows -------------------------------------------------------------------

    @property
    def _names(self) -> tuple[list[str], list[str]]:
        """Whom a snapshot concerns: the workers, and who holds the vectors."""
        return self.nodes.worker_names, self.nodes.holders

    def _begin(self, at_s: float) -> list[Instruction]:
        """Everybody is there: says what is trained, and from where."""
        self.phases.begin()
        self.progress.begin(at_s)
        self.nodes.epoch = 1
        started = replace(
            self._started,
            num_parameters=self.admission.num_parameters,
            chunk_elems=self.admission.chunk_elems,
            optimizer=self.admission.optimizer or self._started.optimizer,
        )
        resumed = self.progress.resumed()
        return [Emit(started)] if resumed is None else [Emit(started), Emit(resumed)]

    def _after_snapshot(self) -> list[Instruction]:
        """Stops the run if that is what the snapshot was for."""
        return self.phases.stop() if self.snapshots.stopped and not self.phases.over else []

    def _participation_changed(self) -> list[Instruction]:
        """Says who takes part now."""
        assert self.participation is not None
        event = ParticipationEvent(
            phase=self.participation.phase,
            active=self.participation.active,
            paused=self.participation.paused,
            samples=self.progress.num_samples,
        )
        return [Emit(event), Notify()]
