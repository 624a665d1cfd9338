"""`Snapshot`: one snapshot of a run: its stage, and the reports of the nodes about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gradstream.checkpoint.draft import VectorPlace
from gradstream.coordinator.lead import Instruction
from gradstream.data.base import DataProgress
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
