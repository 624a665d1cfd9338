"""`Snapshot`: one snapshot of a run: its stage, and the reports of the nodes about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import override

from gradstream.checkpoint.draft import VectorPlace
from gradstream.checkpoint.folder import Policy
from gradstream.checkpoint.manifest import Evaluated
from gradstream.coordinator.lead import ANY, Emit, Instruction, Lead, Lost, Notify, impossible
from gradstream.coordinator.lost_work import OrphanedPushes
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import SampleProgress
from gradstream.data.base import DataProgress
from gradstream.runtime.deadlines import Deadlines, to_wait_longer
from gradstream.telemetry.events import CheckpointEvent, CheckpointFailedEvent
from gradstream.untrusted import escaped
from gradstream.wire import v1


@dataclass(slots=True, eq=False)
class Snapshot:
    """One snapshot.

    Args:
        number: its number, from 1.
        workers: names of the workers that it pauses.
        holders: names of the nodes that write the vectors: see `Nodes.holders`.
        in_rounds: whether all workers stop after the same number of minibatches.
        last: whether the run stops with it.
        began_s: when it began, in seconds.
        ends: whether the run finishes with it: workers only go on to the minibatch where they stop, and no checkpoint
            is written.
    """

    number: int
    workers: Sequence[str]
    holders: Sequence[str]
    in_rounds: bool
    last: bool
    began_s: float
    ends: bool = False
    stage: v1.Snapshot.Stage = v1.Snapshot.PAUSE
    begun: dict[str, int] = field(default_factory=dict)  # by worker, how many minibatches it had begun
    stop_at: dict[str, int] = field(default_factory=dict)  # by worker, after how many it stops
    reached: set[str] = field(default_factory=set)  # workers that have stopped
    versions: dict[str, Sequence[int]] = field(default_factory=dict)  # by holder, of its chunks
    procedures: dict[str, Sequence[bytes]] = field(default_factory=dict)  # by holder, of its chunks
    sums: dict[str, Sequence[int]] = field(default_factory=dict)  # by holder, CRC-32 of its pieces
    places: tuple[VectorPlace, ...] = ()
    resumed_s: float = 0.0  # when the workers resumed
    progress: DataProgress = field(default_factory=DataProgress)
    step: int = 0
    ordered: v1.Snapshot.Stage | None = None  # stage of the last instruction

    @property
    def awaited(self) -> list[str]:
        """Names of the nodes whose reports are missing."""
        there: Iterable[str]
        match self.stage:
            case v1.Snapshot.PAUSE:
                needed, there = self.workers, self.begun
            case v1.Snapshot.STOP:
                needed, there = self.workers, self.reached
            case v1.Snapshot.SNAPSHOT:
                needed, there = self.holders, self.versions
            case v1.Snapshot.ENDED:
                needed, there = (), ()
            case _:
                needed, there = self.holders, self.sums
        return [name for name in needed if name not in there]

    @property
    def pauses_workers(self) -> bool:
        """Whether workers are paused for it."""
        return self.stage != v1.Snapshot.WRITE

    def take(self, who: str, report: v1.SnapshotReport) -> None:
        """Notes a report of a node. A repeated, early or late report changes nothing."""
        kind = v1.SnapshotReport
        match report.kind, self.stage:
            case kind.BEGUN, v1.Snapshot.PAUSE if who in self.workers:
                self.begun.setdefault(who, report.count)
            case kind.REACHED, v1.Snapshot.STOP if who in self.workers:
                self.reached.add(who)
            case kind.HELD, v1.Snapshot.SNAPSHOT if who in self.holders:
                self.versions.setdefault(who, tuple(report.versions))
                self.procedures.setdefault(
                    who, [procedure.SerializeToString() for procedure in report.procedures]
                )
            case kind.WRITTEN, v1.Snapshot.WRITE if who in self.holders:
                self.sums.setdefault(who, tuple(report.sums))

    def stop(self) -> None:
        """Goes from PAUSE to STOP, and decides where each worker stops."""
        furthest = max(self.begun.values(), default=0)
        self.stop_at = {who: furthest if self.in_rounds else count for who, count in self.begun.items()}
        self.stage = v1.Snapshot.STOP

    def as_notice(self) -> v1.Snapshot:
        """Returns it in the form in which notices contain it."""
        places = [v1.Place(vector=p.vector, path=p.path, offset_bytes=p.offset_bytes) for p in self.places]
        return v1.Snapshot(
            number=self.number,
            stage=self.stage,
            stop_at=self.stop_at,
            places=places,
            holders=self.holders if self.stage in (v1.Snapshot.SNAPSHOT, v1.Snapshot.WRITE) else (),
            last=self.last,
            ends=self.ends,
        )


# ---- instructions ------------------------------------------------------------------------
# Instructions that `checkpoint_writer` carries out.


@dataclass(frozen=True, slots=True)
class Prepare(Instruction):
    """All workers are paused: open a draft, ask them for their own state, then call `prepared`."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Commit(Instruction):
    """Everything is written: make it a checkpoint, then call `committed`."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Discard(Instruction):
    """The snapshot has failed: remove its files."""

    snapshot: Snapshot


# ---- last attempt ------------------------------------------------------------------------
# `LastAttempt`: how far the run was at the last attempt to make a checkpoint, from which the next due time follows.


class LastAttempt:
    """The latest attempt to make a checkpoint; before the first, the beginning of the run.

    Args:
        progress: the steps and data epochs in the model.
    """

    KEPT = ("_latest", "_since_s", "_begun_s")
    """See `durable.state`."""

    def __init__(self, progress: SampleProgress) -> None:
        self._progress = progress
        self._latest = self._reached
        self._since_s: float | None = None  # time of the last attempt
        self._begun_s = 0.0

    @property
    def _reached(self) -> tuple[int, int]:
        """Steps and data epochs in the model."""
        return self._progress.step, self._progress.ledger.num_complete

    def begin(self, at_s: float) -> None:
        """Starts the time of a run that has made no attempt yet."""
        if self._since_s is None:
            self._since_s = self._begun_s = at_s

    def begun(self, at_s: float) -> None:
        """Notes that an attempt begins."""
        self._latest, self._since_s = self._reached, at_s

    def failed(self, at_s: float) -> None:
        """Notes that the attempt has failed. The time until the next one starts again."""
        self._since_s = at_s

    def is_due(self, policy: Policy, at_s: float) -> bool:
        """Whether the next checkpoint is due."""
        (steps, epochs), (step, epoch) = self._reached, self._latest
        since_s = at_s if self._since_s is None else self._since_s
        seconds, before_s = at_s - since_s, since_s - self._begun_s
        return policy.due(steps=steps - step, epochs=epochs - epoch, seconds=seconds, before_s=before_s)


# ---- snapshot rounds ---------------------------------------------------------------------

WRITE_S = 1800.0
"""How long the nodes may take to write a snapshot, after the workers have resumed."""

ATTEMPTS = 5
"""How often a snapshot is tried that the run needs: that of a boundary, from which it goes on."""

ERROR_BYTES = 1024
"""Most bytes to keep of a node's error message."""


class SnapshotRounds(Lead):
    """Begins snapshots when they are due, leads one at a time to its end, and reports the outcome.

    Args:
        progress: the minibatches in the model, and where a resumed run continues.
        nodes: the members.
        policy: when a checkpoint is due; None makes no checkpoints: the run just stops.
        deadlines: `cut_s` limits the pause of the workers.
        by_decisions: whether the ledger learns of a round from the first shard's decision, rather than from workers
            that report to have reached it. The decision may come later.
        orphans: pushes of lost workers: no snapshot holds a torn push.

    Attributes:
        current: the snapshot under way.
        kept: folder of the newest checkpoint; "" before the first.
        evaluated: the latest evaluation.
        stopping: whether the run was asked to stop.
        finishing: whether the run has reached its stopping criterion.
        required: whether the run continues from the snapshot with which it stops: a failed one is tried again.
        crossed: whether that snapshot has become a checkpoint.
    """

    KEPT = (
        "_open",
        "kept",
        "evaluated",
        "stopping",
        "finishing",
        "required",
        "crossed",
        "_failures",
        "_count",
        "_last_attempt",
        "_deferred",
    )
    """See `durable.state`."""

    REPORTS: ClassVar = {"snapshot": ANY}

    def __init__(
        self,
        progress: SampleProgress,
        nodes: Nodes,
        policy: Policy | None,
        orphans: OrphanedPushes,
        *,
        deadlines: Deadlines | None = None,
        by_decisions: bool = False,
    ) -> None:
        self.current: Snapshot | None = None
        self.kept = progress.resume.folder if progress.resume is not None else ""
        self.evaluated: Evaluated | None = None
        self.stopping = False
        self.finishing = False
        self.required = False
        self.crossed = False
        self._failures = 0
        self._progress = progress
        self._nodes = nodes
        self._policy = policy
        self._pause_s = (deadlines or Deadlines()).cut_s
        self._by_decisions = by_decisions
        self._orphans = orphans
        self._count = 0
        self._deferred = False
        self._last_attempt = LastAttempt(progress)
        self._cut_short = False  # whether a coordinator process died during a snapshot with files

    @property
    def _open(self) -> Snapshot | bool | None:
        """What a new process of the coordinator keeps of the snapshot under way: everything, if it writes no files."""
        return self.current if self.current is None or self.current.ends else True

    @_open.setter
    def _open(self, value: Snapshot | bool | None) -> None:
        self.current = value if isinstance(value, Snapshot) else None
        self._cut_short = bool(value) and self.current is None

    def restored(self, at_s: float) -> list[Instruction]:
        """Ends the snapshot that was under way when an earlier process of the coordinator died.

        The workers go on, or begin another snapshot if the run is to end.
        """
        out: list[Instruction] = []
        if self._cut_short:
            self._last_attempt.failed(at_s)
            out = [self._failed("coordinator", "the coordinator died while the snapshot was made")]
        if self.current is None and self._policy is not None and (self.stopping or self.finishing):
            out += self.begin(at_s)
        return out

    @property
    def stopped(self) -> bool:
        """Whether the run was asked to stop, and no snapshot is under way."""
        return self.stopping and self.current is None and not self._deferred

    @property
    def ending(self) -> bool:
        """Whether workers know after which minibatch the run ends."""
        return self.current is not None and self.current.ends and self.current.stage != v1.Snapshot.PAUSE

    @property
    def keeps_out(self) -> bool:
        """See `Lead`: every worker that a snapshot names has a part in it."""
        return self.current is not None

    def notice(self, notice: v1.Notice) -> None:
        """Adds the snapshot under way."""
        if self.current is not None:
            notice.snapshot.CopyFrom(self.current.as_notice())

    def proceed(self, at_s: float) -> list[Instruction]:
        """Begins a due snapshot, and ends one that takes too long."""
        self._last_attempt.begin(at_s)
        if self.current is not None:
            return self._check_time(self.current, at_s)
        if self._deferred:
            return self.begin(at_s)
        if self._policy is None or self._progress.ledger.finished or not self._orphans.settled:
            return []
        return self.begin(at_s) if self._last_attempt.is_due(self._policy, at_s) else []

    def _check_time(self, snapshot: Snapshot, at_s: float) -> list[Instruction]:
        if snapshot.stage == v1.Snapshot.STOP != snapshot.ordered and (out := self._advance(snapshot, at_s)):
            return out  # it waited for decisions, or for the pushes of lost workers to be settled
        if self.ending:
            return []  # nothing limits the time of minibatches that were begun
        limit_s, since_s = WRITE_S, snapshot.resumed_s
        if snapshot.pauses_workers:
            limit_s, since_s = self._pause_s, snapshot.began_s
        if at_s - since_s <= limit_s:
            return []
        names = ", ".join(snapshot.awaited or self._orphans.awaited) or "the coordinator"
        more = f"; {to_wait_longer('cut_s')}" if snapshot.pauses_workers else ""
        return self.fail(names, f"nothing came from {names} within {limit_s:g} s{more}", at_s)

    def stop(self, at_s: float) -> list[Instruction]:
        """Lets the run stop with a snapshot: with the one under way, if workers are still paused for it."""
        self.stopping = True
        if self._policy is None or self.finishing:
            return []
        if self.current is None:
            return self.begin(at_s)
        if self.current.pauses_workers:
            self.current.last = True
        return [Notify()]

    def finish(self, at_s: float) -> list[Instruction]:
        """Lets the run finish early, with another snapshot after the one under way."""
        self.finishing = True
        return [] if self.current is not None else self.begin(at_s)

    def begin(self, at_s: float) -> list[Instruction]:
        """Begins a snapshot; later if a worker waits for its first round, or shards are missing or changing."""
        nodes = self._nodes
        self._deferred = bool(nodes.entering or nodes.missing_shards or nodes.handing_over)
        if self._deferred:
            return []
        self._count += 1
        self._last_attempt.begun(at_s)
        self.current = Snapshot(
            number=self._count,
            workers=self._nodes.worker_names,
            holders=self._nodes.holders,
            in_rounds=self._progress.in_rounds,
            last=self.stopping,
            began_s=at_s,
            ends=self.finishing,
        )
        return [Notify()]

    @override
    def check(self, node: v1.Node, kind: str, report: v1.SnapshotReport) -> None:
        most = self._progress.ledger.most_begun
        if report.kind not in v1.SnapshotReport.Kind.values():
            raise impossible(node.name, f"a report of unknown kind {report.kind}")
        if report.count > most:
            raise impossible(node.name, f"{report.count} minibatches begun; expected at most {most}")

    def on_report(
        self, node: v1.Node, kind: str, report: v1.SnapshotReport, at_s: float
    ) -> list[Instruction]:
        """Takes a node's report about its part in the snapshot."""
        snapshot, who = self.current, node.name
        if snapshot is None or report.number != snapshot.number:
            return []
        if report.kind == v1.SnapshotReport.FAILED:
            return self.fail(who, escaped(report.error, ERROR_BYTES), at_s)
        snapshot.take(who, report)
        return self._advance(snapshot, at_s)

    def prepared(self, snapshot: Snapshot, places: Sequence[VectorPlace], at_s: float) -> list[Instruction]:
        """Goes on to SNAPSHOT: the draft is open, and the workers have sent their own state."""
        if snapshot is not self.current:
            return [Discard(snapshot)]
        snapshot.places, snapshot.stage = tuple(places), v1.Snapshot.SNAPSHOT
        return [Notify(), *self._advance(snapshot, at_s)]

    def committed(self, snapshot: Snapshot, folder: str, size_bytes: int, at_s: float) -> list[Instruction]:
        """Ends a snapshot that has become the checkpoint `folder`."""
        self.kept = folder
        event = CheckpointEvent(
            step=snapshot.step,
            folder=folder,
            size_bytes=size_bytes,
            paused_s=snapshot.resumed_s - snapshot.began_s,
            total_s=at_s - snapshot.began_s,
        )
        if snapshot is not self.current:
            return [Emit(event)]
        self.current = None
        self.crossed = self.required and snapshot.last
        again = self.finishing or (self.stopping and not snapshot.last)
        return [Emit(event), *(self.begin(at_s) if again else [Notify()])]

    def on_lost(self, lost: Lost, at_s: float) -> list[Instruction]:
        """Ends the snapshot if it needs a node that was lost. In WRITE it needs only the holders."""
        snapshot, who = self.current, lost.worker or lost.node.name
        if snapshot is None:
            return []
        if who not in snapshot.holders and not (snapshot.pauses_workers and who in snapshot.workers):
            return []
        if self.ending:  # the other workers still reach the minibatch where they stop
            snapshot.workers = [worker for worker in snapshot.workers if worker != who]
            return self._advance(snapshot, at_s)
        failed = self.fail(who, f"{who} was lost while the snapshot was made", at_s)
        return [*failed, *(self.begin(at_s) if self.stopping or self.finishing else [])]

    def fail(self, who: str, why: str, at_s: float) -> list[Instruction]:
        """Ends the snapshot without a checkpoint. The run continues, and the previous checkpoint is kept."""
        snapshot, self.current = self.current, None
        if snapshot is None:
            return []
        self._last_attempt.failed(at_s)
        if snapshot.ends:
            return []
        self._failures += self.required
        self._deferred = self.required and self._failures < ATTEMPTS
        return [Discard(snapshot), self._failed(who, why), Notify()]

    def _failed(self, who: str, why: str) -> Emit:
        return Emit(CheckpointFailedEvent(step=self._progress.step, who=who, message=why, kept=self.kept))

    def give_up(self) -> list[Instruction]:
        """Lets a run go on that was to stop with a required snapshot."""
        self.stopping = self.required = self._deferred = False
        return [*self.drop(), Notify()]

    def drop(self) -> list[Instruction]:
        """Ends the snapshot under way: the run is over."""
        snapshot, self.current = self.current, None
        return [] if snapshot is None or snapshot.ends else [Discard(snapshot)]

    def _advance(self, snapshot: Snapshot, at_s: float) -> list[Instruction]:
        """Enters the next stage if all reports of the current one are there."""
        if snapshot.awaited:
            return []
        if snapshot.stage == v1.Snapshot.STOP and (self._undecided(snapshot) or not self._orphans.settled):
            return []
        match snapshot.stage:
            case v1.Snapshot.PAUSE:
                snapshot.stop()
                return [Notify(), *self._advance(snapshot, at_s)]
            case v1.Snapshot.STOP if snapshot.ends:
                snapshot.stage = v1.Snapshot.ENDED
                return [Notify()]
            case v1.Snapshot.STOP:
                snapshot.progress, snapshot.step = self._progress.ledger.progress(), self._progress.step
                return self._order(snapshot, Prepare(snapshot))
            case v1.Snapshot.SNAPSHOT:
                if any(version < 0 for versions in snapshot.versions.values() for version in versions):
                    return self.fail("coordinator", "there are no parameters yet", at_s)
                snapshot.stage, snapshot.resumed_s = v1.Snapshot.WRITE, at_s
                return [Notify(), *self._advance(snapshot, at_s)]
            case v1.Snapshot.ENDED:
                return []
            case _:
                return self._order(snapshot, Commit(snapshot))

    def _undecided(self, snapshot: Snapshot) -> bool:
        """Whether the decision on a round that workers have gone through has not come yet."""
        return self._by_decisions and self._progress.ledger.num_rounds < max(
            snapshot.stop_at.values(), default=0
        )

    @staticmethod
    def _order(snapshot: Snapshot, instruction: Instruction) -> list[Instruction]:
        """Gives the instruction once per stage: nodes may repeat their reports."""
        if snapshot.ordered == snapshot.stage:
            return []
        snapshot.ordered = snapshot.stage
        return [instruction]
