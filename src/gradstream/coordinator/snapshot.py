"""A consistent snapshot, as a pure state machine: reports of nodes go in, phases come out.

    PAUSE ─all begun─▶ STOP ─all reached─▶ (Prepare) ─▶ SNAPSHOT ─all held─▶ WRITE ─all written─▶ (Commit)

Where data is divided in rounds, all workers stop after the round that the furthest of them has
begun; else each after the minibatch it is in. So the model holds whole minibatches, the ledger
says which, and nobody waits for somebody who has stopped: the one that is behind is let on, and the
one that is ahead has begun nothing that the others do not get to.

A run that has done enough finishes with such a snapshot: STOP is then followed by ENDED, which says that
everything that was begun is in the model, and nothing is written but the final parameters.

Workers stand still from PAUSE to SNAPSHOT. A node that is lost then, or a deadline that passes,
ends the snapshot and not the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gradstream.checkpoint.folder import VectorPlace
from gradstream.checkpoint.manifest import Evaluated, Resume
from gradstream.checkpoint.policy import Policy
from gradstream.coordinator.instructions import Commit, Discard, Emit, Instruction, Notify, Prepare
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.data.progress import DataProgress
from gradstream.telemetry.events import CheckpointEvent, CheckpointFailedEvent
from gradstream.untrusted import escaped
from gradstream.wire import v1

__all__ = ["Snapshot", "SnapshotLimits", "SnapshotRounds"]

ERROR_BYTES = 1024
"""Of what a node says of its failure to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLimits:
    """How long a snapshot may take.

    Args:
        hold_s: from PAUSE until all shards hold their ranges: workers stand still.
        write_s: from there until everything is on the disk.
    """

    hold_s: float = 120.0
    write_s: float = 1800.0


@dataclass(slots=True, eq=False)
class Snapshot:
    """One snapshot.

    Args:
        number: from 1.
        workers: who stands still for it.
        shards: who holds the vectors: the shards, or the workers where there are no servers.
        together: all workers stop after the same number of minibatches.
        last: the run stops with it.
        ends: the run finishes with it: workers have no more to do than to get to where they stop, and
            nothing is written.
        began_s: when it began.
    """

    number: int
    workers: Sequence[str]
    shards: Sequence[str]
    together: bool
    last: bool
    began_s: float
    ends: bool = False
    phase: v1.Snapshot.Phase = v1.Snapshot.PAUSE
    begun: dict[str, int] = field(default_factory=dict)
    stop_at: dict[str, int] = field(default_factory=dict)
    versions: dict[str, Sequence[int]] = field(default_factory=dict)
    sums: dict[str, Sequence[int]] = field(default_factory=dict)
    places: tuple[VectorPlace, ...] = ()
    resumed_s: float = 0.0  # when workers went on
    progress: DataProgress = field(default_factory=DataProgress)
    step: int = 0
    reached: set[str] = field(default_factory=set)
    ordered: v1.Snapshot.Phase | None = None  # the phase that an instruction was given in

    @property
    def awaited(self) -> list[str]:
        """For whom it waits."""
        there: Iterable[str]
        match self.phase:
            case v1.Snapshot.PAUSE:
                needed, there = self.workers, self.begun
            case v1.Snapshot.STOP:
                needed, there = self.workers, self.reached
            case v1.Snapshot.SNAPSHOT:
                needed, there = self.shards, self.versions
            case v1.Snapshot.ENDED:
                needed, there = (), ()
            case _:
                needed, there = self.shards, self.sums
        return [name for name in needed if name not in there]

    @property
    def holds_workers(self) -> bool:
        """Whether workers stand still for it."""
        return self.phase != v1.Snapshot.WRITE

    def take(self, who: str, report: v1.SnapshotReport) -> None:
        """Notes what a node says. What is said twice, too early or too late changes nothing."""
        kind = v1.SnapshotReport
        match report.kind, self.phase:
            case kind.BEGUN, v1.Snapshot.PAUSE if who in self.workers:
                self.begun.setdefault(who, report.count)
            case kind.REACHED, v1.Snapshot.STOP if who in self.workers:
                self.reached.add(who)
            case kind.HELD, v1.Snapshot.SNAPSHOT if who in self.shards:
                self.versions.setdefault(who, tuple(report.versions))
            case kind.WRITTEN, v1.Snapshot.WRITE if who in self.shards:
                self.sums.setdefault(who, tuple(report.sums))

    def stop(self) -> None:
        """PAUSE → STOP: how far each worker goes."""
        furthest = max(self.begun.values(), default=0)
        self.stop_at = {who: furthest if self.together else count for who, count in self.begun.items()}
        self.phase = v1.Snapshot.STOP

    def as_notice(self) -> v1.Snapshot:
        """As every node is told it."""
        places = [v1.Place(vector=p.vector, path=p.path, offset_bytes=p.offset_bytes) for p in self.places]
        return v1.Snapshot(
            number=self.number,
            phase=self.phase,
            stop_at=self.stop_at,
            places=places,
            last=self.last,
            ends=self.ends,
        )


class SnapshotRounds:
    """Begins snapshots when they are due, leads one at a time to its end, and says what became of it.

    Args:
        ledger: which minibatches are in the model.
        policy: when a checkpoint is due.
        together: all workers stop after the same number of minibatches.
        resume: where the run has begun.
        limits: deadlines.
        enabled: whether there is a disk to keep checkpoints on; without, the run just stops.
        verdicts: the ledger hears of rounds from the first shard, and not from who reports to have
            reached them: it may hear later.
    """

    def __init__(
        self,
        ledger: Ledger | OpenLedger,
        policy: Policy,
        *,
        together: bool,
        resume: Resume | None = None,
        limits: SnapshotLimits | None = None,
        enabled: bool = True,
        verdicts: bool = False,
    ) -> None:
        self.current: Snapshot | None = None
        self.kept = resume.folder if resume is not None else ""  # the newest checkpoint
        self.evaluated: Evaluated | None = None
        self.stopping = False
        self.finishing = False  # the run has done enough
        self._enabled = enabled
        self._verdicts = verdicts
        self._ledger = ledger
        self._policy = policy
        self._together = together
        self._first_step = resume.step if resume is not None else 0
        self._limits = limits or SnapshotLimits()
        self._count = 0
        self._last_step = self._first_step
        self._last_epochs = ledger.num_complete
        self._last_s: float | None = None

    @property
    def step(self) -> int:
        """Rounds in the model, where data is divided in rounds; else minibatches of all workers."""
        ledger = self._ledger
        return self._first_step + (ledger.num_rounds if self._together else ledger.num_receipts)

    @property
    def stopped(self) -> bool:
        """Whether the run was to stop, and nothing more is to be waited for."""
        return self.stopping and self.current is None

    def tick(self, at_s: float, workers: Sequence[str], shards: Sequence[str]) -> list[Instruction]:
        """Looks at the clock and the ledger: begins a snapshot that is due, ends one that takes too long."""
        if self._last_s is None:
            self._last_s = at_s
        snapshot = self.current
        if snapshot is not None:
            if (
                self._verdicts
                and snapshot.phase == v1.Snapshot.STOP
                and (out := self._advance(snapshot, at_s))
            ):
                return out
            if self.ending:
                return []  # what they have begun takes as long as it takes
            limit_s = self._limits.hold_s if snapshot.holds_workers else self._limits.write_s
            if at_s - (snapshot.began_s if snapshot.holds_workers else snapshot.resumed_s) > limit_s:
                names = ", ".join(snapshot.awaited) or "the coordinator"
                return self.fail(names, f"nothing came from {names} within {limit_s:g} s", at_s)
            return []
        due = self._policy.due(
            steps=self.step - self._last_step,
            epochs=self._ledger.num_complete - self._last_epochs,
            seconds=at_s - self._last_s,
        )
        if not due or not self._enabled or self._ledger.finished:
            return []
        return self.begin(at_s, workers, shards)

    def stop(self, at_s: float, workers: Sequence[str], shards: Sequence[str]) -> list[Instruction]:
        """The run is to stop with a snapshot: with the one under way, if workers stand still for it."""
        self.stopping = True
        if not self._enabled or self.finishing:
            return []
        if self.current is None:
            return self.begin(at_s, workers, shards)
        if self.current.holds_workers:
            self.current.last = True
        return [Notify()]

    def finish(self, at_s: float, workers: Sequence[str], shards: Sequence[str]) -> list[Instruction]:
        """The run is to finish early: with a snapshot of its own, after the one under way."""
        self.finishing = True
        return [] if self.current is not None else self.begin(at_s, workers, shards)

    @property
    def ending(self) -> bool:
        """Whether workers have been told after which minibatch the run ends."""
        return self.current is not None and self.current.ends and self.current.phase != v1.Snapshot.PAUSE

    def begin(self, at_s: float, workers: Sequence[str], shards: Sequence[str]) -> list[Instruction]:
        """PAUSE."""
        self._count += 1
        self._last_step, self._last_epochs, self._last_s = self.step, self._ledger.num_complete, at_s
        self.current = Snapshot(
            self._count, workers, shards, self._together, self.stopping, at_s, self.finishing
        )
        return [Notify()]

    def report(self, who: str, report: v1.SnapshotReport, at_s: float) -> list[Instruction]:
        """A node says how far it is."""
        snapshot = self.current
        if snapshot is None or report.number != snapshot.number:
            return []
        if report.kind == v1.SnapshotReport.FAILED:
            return self.fail(who, escaped(report.error, ERROR_BYTES), at_s)
        snapshot.take(who, report)
        return self._advance(snapshot, at_s)

    def prepared(self, snapshot: Snapshot, places: Sequence[VectorPlace], at_s: float) -> list[Instruction]:
        """The draft is open, and the workers' own state is here: shards may hold their ranges."""
        if snapshot is not self.current:
            return [Discard(snapshot)]
        snapshot.places, snapshot.phase = tuple(places), v1.Snapshot.SNAPSHOT
        return [Notify(), *self._advance(snapshot, at_s)]

    def committed(
        self,
        snapshot: Snapshot,
        folder: str,
        size_bytes: int,
        at_s: float,
        workers: Sequence[str],
        shards: Sequence[str],
    ) -> list[Instruction]:
        """It is on the disk under its name."""
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
        due = self.finishing or (self.stopping and not snapshot.last)
        again = self.begin(at_s, workers, shards) if due else []
        return [Emit(event), *(again or [Notify()])]

    def lost(self, who: str, at_s: float, workers: Sequence[str], shards: Sequence[str]) -> list[Instruction]:
        """A node is gone. Once the shards hold their ranges, only who writes them is needed.

        Args:
            workers, shards: who is left, to make another snapshot if the run is to stop with one.
        """
        snapshot = self.current
        if (
            snapshot is None
            or who not in snapshot.workers
            or not (snapshot.holds_workers or who in snapshot.shards)
        ):
            return []
        if self.ending:  # the others get to where they stop all the same
            snapshot.workers = [worker for worker in snapshot.workers if worker != who]
            return self._advance(snapshot, at_s)
        failed = self.fail(who, f"{who} was lost while the snapshot was made", at_s)
        again = self.stopping or self.finishing
        return [*failed, *(self.begin(at_s, workers, shards) if again else [])]

    def fail(self, who: str, why: str, at_s: float) -> list[Instruction]:
        """Nothing comes of the snapshot under way; the run goes on, and the checkpoint of before is kept."""
        snapshot, self.current = self.current, None
        if snapshot is None:
            return []
        self._last_s = at_s
        if snapshot.ends:
            return []
        event = CheckpointFailedEvent(step=self.step, who=who, message=why, kept=self.kept)
        return [Discard(snapshot), Emit(event), Notify()]

    def drop(self) -> list[Instruction]:
        """The run is over: no snapshot is of use any more."""
        snapshot, self.current = self.current, None
        return [] if snapshot is None or snapshot.ends else [Discard(snapshot)]

    def _advance(self, snapshot: Snapshot, at_s: float) -> list[Instruction]:
        if snapshot.awaited or (snapshot.phase == v1.Snapshot.STOP and self._unheard_of(snapshot)):
            return []
        match snapshot.phase:
            case v1.Snapshot.PAUSE:
                snapshot.stop()
                return [Notify(), *self._advance(snapshot, at_s)]
            case v1.Snapshot.STOP if snapshot.ends:
                snapshot.phase = v1.Snapshot.ENDED
                return [Notify()]
            case v1.Snapshot.STOP:
                snapshot.progress, snapshot.step = self._ledger.progress(), self.step
                return self._order(snapshot, Prepare(snapshot))
            case v1.Snapshot.SNAPSHOT:
                if any(version < 0 for versions in snapshot.versions.values() for version in versions):
                    return self.fail("coordinator", "there are no parameters yet", at_s)
                snapshot.phase, snapshot.resumed_s = v1.Snapshot.WRITE, at_s
                return [Notify(), *self._advance(snapshot, at_s)]
            case v1.Snapshot.ENDED:
                return []
            case _:
                return self._order(snapshot, Commit(snapshot))

    def _unheard_of(self, snapshot: Snapshot) -> bool:
        """Whether the verdict on a round that workers have gone through is still on its way."""
        return self._verdicts and self._ledger.num_rounds < max(snapshot.stop_at.values(), default=0)

    @staticmethod
    def _order(snapshot: Snapshot, instruction: Instruction) -> list[Instruction]:
        """Once in a phase: nodes may say a thing twice."""
        if snapshot.ordered == snapshot.phase:
            return []
        snapshot.ordered = snapshot.phase
        return [instruction]
