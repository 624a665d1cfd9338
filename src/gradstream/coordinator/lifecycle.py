"""The life of the run, from the first node that joins to its end, as a pure state machine.

    GATHERING ──begin──▶ TRAINING ──conclude──▶ FINISHED
        │                    │
        └──abort, stop───────┴──▶ ABORTED, STOPPED

The run is FINISHED when every minibatch has a receipt and every remaining worker has finished; ABORTED when
it cannot get there any more; STOPPED on request. These three are final. A plan that another one follows ends STOPPED,
too: at a boundary, with a checkpoint from which the same nodes go on. Which plans there are (`job.phases`) is not
known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradstream.checkpoint.manifest import JobPhase
from gradstream.coordinator.lead import Emit, Instruction, Lead, Lost, Notify
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import SampleProgress
from gradstream.coordinator.relay import RunClock
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.errors import NonFiniteError, PeerLostError
from gradstream.telemetry.events import FailedEvent, StartedEvent, StoppedEvent
from gradstream.wire import v1


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTolerance:
    """Which losses of nodes, and which changes of their number, a run survives.

    Args:
        survives_worker_loss: the strategy continues without a lost worker, whose minibatches others take.
        quorum: number of gradients that make an update; the run needs as many workers. Decisions of the first
            shard then tell which minibatches are in the model, and receipts do not. None: no quorum.
        allow_lost: the run ends well although data of lost workers is missing from the model.
        quarantine_after: number of refused gradients in a row for which a worker counts as lost.
        obstacle: why no new process can take the place of a lost worker while the others train; "" if one can.
        redoes: shards say what the model has of a lost worker's pushes, and others redo those that are torn.
        stands_in: until a new process is there, one of the others computes its part of each round.
        keeps_shards: why the run cannot change its number of shards, and what to do; "" if it can.
        acknowledge: when shards acknowledge pushes. A lost shard comes back from its backup, "logged" in a file or
            "replicated" on another shard; where it is "applied", the run ends.
        skips_lost: rounds go on without a lost worker, whose part of them is skipped: see `stand_ins`.
        regroups: the workers exchange in a group, which is formed again at each loss and for each newcomer.
        stays: why no more workers may come than there were at the beginning, and what to do; "" if they may.
    """

    survives_worker_loss: bool
    quorum: int | None = None
    allow_lost: bool = False
    quarantine_after: int = 3
    obstacle: str = "no process is started for it"
    redoes: bool = False
    stands_in: bool = False
    skips_lost: bool = False
    regroups: bool = False
    stays: str = "its workers are those of the beginning"
    keeps_shards: str = ""
    acknowledge: Literal["applied", "logged", "replicated"] = "applied"

    @property
    def replaces(self) -> bool:
        """Whether a new process can take the place of a lost worker."""
        return not self.obstacle

    @property
    def grows(self) -> bool:
        """Whether more workers may come than there were at the beginning."""
        return not self.stays

    @property
    def regroups_after_loss(self) -> bool:
        """Whether the others form their group again when one of them is lost."""
        return self.regroups and (self.stands_in or self.skips_lost)


@dataclass
class Boundary:
    """Where the nodes of a run go on with another plan, in the same processes and from a checkpoint.

    Args:
        number: how many boundaries there are up to this one, in all processes of the run.
        clock: time of the run; None begins it.
        before: the nodes of the plan before; None in processes that have not gone through it.
        resume: the checkpoint, as JSON; "" where these processes begin the run, or a resumed one. It is kept: a new
            process of the coordinator learns from it which plan it leads.
    """

    KEPT = ("resume",)
    """See `durable.state`."""

    number: int = 0
    clock: RunClock | None = None
    before: Nodes | None = None
    resume: str = ""


class Lifecycle(Lead):
    """Leads a run from the first node that joins to its end.

    Args:
        started: the run as planned.
        nodes: the members, and which workers have finished.
        progress: the minibatches in the model.
        snapshots: a run that ends early ends with a snapshot.
        losses: which losses the run survives.
        boundary: the one after which this plan began.
        successor: where the run goes on after this plan; None: it ends with it.

    Attributes:
        boundary: see above.
        status: how far the run is.
        reason: why the run was aborted; "" if it was not.
        error: name of the exception that the launcher raises then.
        culprit: name of the node that caused it.
        criterion: the stopping criterion that was reached; "" while none is.
        crossing: this plan ends, and the nodes go on with another one.
        follows: how the checkpoint with which this plan ends says that; None: the run ends with it.
        asked: somebody has asked the run to stop.
    """

    KEPT = ("status", "reason", "error", "culprit", "criterion", "crossing", "follows", "asked")
    """See `durable.state`."""

    def __init__(
        self,
        started: StartedEvent,
        nodes: Nodes,
        progress: SampleProgress,
        snapshots: SnapshotRounds,
        losses: LossTolerance,
        boundary: Boundary | None = None,
        successor: JobPhase | None = None,
    ) -> None:
        self.crossing = False
        self.asked = False
        self.follows = self._successor = successor
        self.boundary = boundary or Boundary()
        self.status: v1.Notice.Status = v1.Notice.GATHERING
        self.reason = ""
        self.error = ""
        self.culprit = ""
        self.criterion = ""
        self._started = started
        self._nodes = nodes
        self._progress = progress
        self._snapshots = snapshots
        self._losses = losses
        self._needed = losses.quorum or (1 if losses.survives_worker_loss else started.workers)

    @property
    def over(self) -> bool:
        """Whether the run is FINISHED, ABORTED or STOPPED."""
        return self.status >= v1.Notice.FINISHED

    @property
    def next_boundary(self) -> int:
        """Number of the boundary at which the nodes go on, as this plan has ended; 0: they do not."""
        crossed = self.crossing and self._snapshots.crossed
        goes_on = self.status == v1.Notice.STOPPED and crossed and not self.asked
        return self.boundary.number + 1 if goes_on else 0

    @property
    def gathering(self) -> bool:
        """Whether the run waits for nodes to join."""
        return self.status == v1.Notice.GATHERING

    @property
    def training(self) -> bool:
        """Whether all nodes have joined, and the run is not over."""
        return self.status == v1.Notice.TRAINING

    def why_closed(self, role: str) -> str:
        """Says why a node of this role cannot join now; "" if it can, at once or later: see `may_enter`."""
        if self.gathering or (role == "shard" and self._losses.acknowledge != "applied" and not self.over):
            return ""
        if (
            self.over
            or self._snapshots.stopping
            or self._snapshots.finishing
            or self._progress.ledger.finished
            or self._progress.is_ending
        ):
            return "the run is at its end, nobody can join any more"
        if role == "shard":
            return f"training has begun, and no {role} can join after that"
        if not self._losses.replaces:
            return f"training has begun, and no worker can take the place of another: {self._losses.obstacle}"
        return ""

    @property
    def may_enter(self) -> bool:
        """Whether a worker that joins after training has begun can begin now, or waits.

        The first receipt tells that the parameters have their first values. A shard that is missing cannot give it
        parameters.
        """
        return self._progress.ledger.num_receipts > 0 and not self._nodes.missing_shards

    def cross(self, at_s: float, to: JobPhase | None = None) -> list[Instruction]:
        """Ends this plan with a checkpoint from which the nodes go on, if anything follows.

        Repeating it changes nothing.

        Args:
            at_s: time in seconds.
            to: where they go on; None: where the plan's end says.
        """
        follows = to or self.follows
        if follows is None or self.crossing or self._snapshots.stopping or self._snapshots.finishing:
            return []
        self.follows = follows
        self.crossing = self._snapshots.required = True
        return self._snapshots.stop(at_s)

    def _complete(self, at_s: float) -> list[Instruction]:
        """Goes on after the last minibatch of this plan. Nothing is left for a boundary that was to come before it."""
        if not self.crossing or self._successor is not None or self.asked:
            return self.cross(at_s)
        self.crossing, self.follows = False, None
        return self._snapshots.give_up()

    @property
    def can_begin(self) -> bool:
        """Whether the training can begin without the nodes that are missing: some workers, at most."""
        there, shards = len(self._nodes.active_workers), self._nodes.missing_shards
        return not shards and there >= self._needed and there > 0

    def notice(self, notice: v1.Notice) -> None:
        """Adds how far the run is, and why it has ended."""
        notice.status, notice.culprit = self.status, self.culprit
        notice.error, notice.reason = self.error, self.reason
        notice.next_boundary = self.next_boundary

    def ask_to_stop(self, at_s: float) -> list[Instruction]:
        """Stops the run on request, with a snapshot if training has begun. Repeating it changes nothing."""
        if self.over or self.asked:
            return []
        self.asked = True
        if self.gathering:
            return self._stop()
        if self._snapshots.stopping:  # with the checkpoint of a boundary
            return []
        return self._snapshots.stop(at_s) + self.after_snapshot()

    def finish(self, reason: str, at_s: float) -> list[Instruction]:
        """Finishes the run early, with the minibatches that workers have begun. Repeating it changes nothing."""
        if not self.training or self._snapshots.stopping or self._snapshots.finishing:
            return []
        self.criterion = reason
        return self._snapshots.finish(at_s)

    def finish_plan(self, reason: str, at_s: float) -> list[Instruction]:
        """Ends this plan early, and the run with it where nothing follows: see `finish`."""
        if self.follows is None:
            return self.finish(reason, at_s)
        if not self.training or self.crossing:
            return []
        self.criterion = reason
        return self.cross(at_s) + self.after_snapshot()

    @property
    def pauses(self) -> bool:
        """Whether workers are paused for a snapshot, or about to be."""
        current = self._snapshots.current
        return current is not None and current.pauses_workers

    def after_snapshot(self) -> list[Instruction]:
        """Stops the run if that is what the latest snapshot was made for."""
        return self._stop() if self._snapshots.stopped and not self.over else []

    def _stop(self) -> list[Instruction]:
        """Ends the run, or this plan of it, with the newest checkpoint."""
        self.status = v1.Notice.STOPPED
        self._nodes.cross()
        if self.next_boundary:
            return [Notify()]
        return [Emit(StoppedEvent(step=self._progress.step, folder=self._snapshots.kept)), Notify()]

    def abort(self, culprit: str, error: str, message: str, traceback: str = "") -> list[Instruction]:
        """Ends a run that cannot continue.

        Args:
            culprit: name of the node that caused it.
            error: name of the exception that the launcher raises.
            message: what happened.
            traceback: the user's traceback, if the user's code failed.
        """
        self.status, self.culprit = v1.Notice.ABORTED, culprit
        self.error, self.reason = error, message
        failed = FailedEvent(culprit=culprit, error=error, message=message, traceback=traceback)
        return [*self._snapshots.drop(), Emit(failed), Notify()]

    def on_lost(self, lost: Lost, at_s: float) -> list[Instruction]:
        """Ends a run that cannot continue without a lost node."""
        if lost.node.role == "shard" and lost.node.rank not in self._nodes.placement:
            return []  # it holds no parameters
        hopeless, who = self._why_hopeless(lost.node), lost.node.name
        if not hopeless:
            return []
        kind = NonFiniteError if who in self._nodes.expelled else PeerLostError
        return self.abort(who, kind.__name__, f"{lost.reason}; {hopeless}")

    def _why_hopeless(self, gone: v1.Node) -> str:
        """Says why the run cannot continue without a lost node; "" if it can."""
        if gone.role == "shard":
            return self._why_gone(gone)
        left = len(self._nodes.active_workers)
        if left >= self._needed:
            return ""
        if not left:
            return "no worker is left"
        needs = "every worker" if self._needed == self._started.workers else f"{self._needed} workers"
        name, why = self._started.strategy, self._losses.obstacle
        return f"strategy {name!r} needs {needs}, and nobody can take its place: {why}"

    def _why_gone(self, gone: v1.Node) -> str:
        """Says why the parameters of a lost shard, or of one that it had a backup of, are gone; "" if they are not."""
        if self._losses.acknowledge == "logged":
            return ""
        lost = f"its ranges of the parameters are gone with it (shard rank {gone.rank})"
        if self._losses.acknowledge == "applied":
            return f"{lost}: acknowledge='replicated' or 'logged' keeps a backup"
        bare = [name for name in self._nodes.missing_shards if not self._nodes.is_backed_up(name)]
        return f"{lost}: no other shard has a whole backup of {', '.join(bare)}" if bare else ""

    def conclude(self, at_s: float) -> list[Instruction]:
        """Reports data epochs that have become complete, and ends the run, or this plan, if everything is done."""
        if self.over:
            return []
        ledger = self._progress.ledger
        out: list[Instruction] = [Emit(epoch) for epoch in self._progress.completed()]
        if ledger.finished:
            out += self._complete(at_s)
        if self.crossing or self._nodes.unfinished:
            return out
        early = self._snapshots.ending and not ledger.finished
        if not ledger.finished and not early:
            if self._losses.quorum is not None:
                return out  # the last decisions are on their way
            epoch, missing = self._progress.num_unaccounted
            return out + self.abort(
                self._nodes.worker_names[0],
                "InternalError",
                f"every worker has finished, but {missing} batches of data epoch "
                f"{epoch} have no receipt: a strategy must push the gradient of each of its batches",
            )
        if self._progress.last_refused and self._progress.num_samples == 0:
            message = (
                f"{self._progress.last_refused}. No gradient of this run was finite, so nothing was learnt"
            )
            return out + self.abort(self._nodes.worker_names[0], NonFiniteError.__name__, message)
        out += [] if early else [*self._report_losses(), *map(Emit, self._progress.brief())]
        self.status = v1.Notice.FINISHED
        done = self._progress.finished(self.criterion)
        return [*out, *self._snapshots.drop(), Emit(done), Notify()]

    def _report_losses(self) -> list[Instruction]:
        """Reports what became of lost workers' data, and that the run failed if some of it is missing.

        Even then the remaining workers go on to their end, and the model is kept.
        """
        losses = self._progress.losses()
        out: list[Instruction] = [Emit(loss) for loss in losses]
        missing = [loss for loss in losses if loss.missing != 0]
        if missing and not self._losses.allow_lost:
            text = "; ".join(loss.message for loss in missing)
            message = f"{text}. The model is kept. allow_lost=True, --allow-lost, says that this is meant"
            error, culprit = PeerLostError.__name__, missing[0].who
            out.append(Emit(FailedEvent(culprit=culprit, error=error, message=message, traceback="")))
        return out
