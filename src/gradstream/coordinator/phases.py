"""How the run stands, and what is concluded about its end, as a pure state machine.

    GATHERING ──begin──▶ TRAINING ──conclude──▶ FINISHED
        │                    │
        └──abort, stop───────┴──▶ ABORTED, STOPPED

FINISHED when every batch has a receipt and every worker that is left has finished; ABORTED when that cannot
be reached any more; STOPPED when somebody asked for it. From these three nothing leads on.
"""

from __future__ import annotations

from gradstream.coordinator.instructions import Emit, Instruction, Notify
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.participation import ParticipationSchedule
from gradstream.coordinator.progress import SampleProgress
from gradstream.coordinator.snapshot import SnapshotRounds
from gradstream.errors import PeerLostError
from gradstream.telemetry.events import FailedEvent, StartedEvent, StoppedEvent
from gradstream.wire import v1

__all__ = ["Phases"]


class Phases:
    """Leads a run from one phase to the next.

    Args:
        started: the run as planned.
        nodes: who is in, and has finished.
        progress: what is in the model.
        snapshots: one may be what the run ends with.
        participation: who is held back has to be let go in the end; None where nobody is.
        survives_worker_loss: the strategy goes on without a lost worker.
        quorum: so many workers are needed, and verdicts tell what is in the model; None leaves it to
            `survives_worker_loss`.
        allow_lost: the run ends well without data of lost workers that nobody could take over.

    Attributes:
        phase: the present one.
        reason: why the run was aborted; "" if it was not.
        culprit: the node that this is due to.
        criterion: the criterion that was reached; "" as long as none is.
    """

    def __init__(
        self,
        started: StartedEvent,
        nodes: Nodes,
        progress: SampleProgress,
        snapshots: SnapshotRounds,
        participation: ParticipationSchedule | None,
        *,
        survives_worker_loss: bool,
        quorum: int | None,
        allow_lost: bool = False,
    ) -> None:
        self.phase: v1.Notice.Phase = v1.Notice.GATHERING
        self.reason = ""
        self.culprit = ""
        self.criterion = ""
        self._started = started
        self._nodes = nodes
        self._progress = progress
        self._snapshots = snapshots
        self._participation = participation
        self._allow_lost = allow_lost
        self._by_verdicts = quorum is not None
        self._needed = quorum or (1 if survives_worker_loss else started.workers)

    @property
    def over(self) -> bool:
        """Whether the run is FINISHED, ABORTED or STOPPED."""
        return self.phase >= v1.Notice.FINISHED

    @property
    def gathering(self) -> bool:
        """Whether nodes are waited for."""
        return self.phase == v1.Notice.GATHERING

    @property
    def training(self) -> bool:
        """Whether all were there, and the run is not over."""
        return self.phase == v1.Notice.TRAINING

    def begin(self) -> None:
        """Everybody is there."""
        self.phase = v1.Notice.TRAINING

    def stop(self) -> list[Instruction]:
        """Ends the run with the newest checkpoint."""
        self.phase = v1.Notice.STOPPED
        return [Emit(StoppedEvent(step=self._snapshots.step, folder=self._snapshots.kept)), Notify()]

    def abort(self, culprit: str, error: str, message: str, traceback: str = "") -> list[Instruction]:
        """Ends the run, since it cannot go on.

        Args:
            culprit: the node that this is due to.
            error: name of the exception that the launcher raises.
            message: what happened.
            traceback: the user's, if the user's code failed.
        """
        self.phase, self.culprit = v1.Notice.ABORTED, culprit
        self.reason = f"{error}: {message}"
        failed = FailedEvent(culprit=culprit, error=error, message=message, traceback=traceback)
        return [*self._snapshots.drop(), Emit(failed), Notify()]

    def why_hopeless(self, gone: v1.Node) -> str:
        """Why the run cannot go on without a node that is gone, or ""."""
        if gone.role == "shard":
            return f"its ranges of the parameters are gone with it (shard rank {gone.rank})"
        left = len(self._nodes.workers)
        if left >= self._needed:
            return ""
        if not left:
            return "no worker is left"
        needs = "every worker" if self._needed == self._started.workers else f"{self._needed} workers"
        return f"strategy {self._started.strategy!r} needs {needs}"

    def conclude(self) -> list[Instruction]:
        """Reports data epochs that are complete now, and ends the run if everything is done."""
        if self.over:
            return []
        ledger = self._progress.ledger
        out: list[Instruction] = [Emit(epoch) for epoch in self._progress.completed()]
        if ledger.finished and self._participation is not None and self._participation.dismiss():
            out.append(Notify())
        if self._nodes.unfinished:
            return out
        early = self._snapshots.ending and not ledger.finished
        if not ledger.finished and not early:
            if self._by_verdicts:
                return out  # the last ones are on their way
            return out + self._abort_unaccounted()
        out += [] if early else [*self._losses(), *map(Emit, self._progress.brief())]
        self.phase = v1.Notice.FINISHED
        done = self._progress.finished(self.criterion if early else "")
        return [*out, *self._snapshots.drop(), Emit(done), Notify()]

    def _losses(self) -> list[Instruction]:
        """Says what became of lost workers' data. The run has finished, but not well, where some is missing.

        The scripts that are left go on to their end, and the model is kept.
        """
        told = self._progress.losses()
        out: list[Instruction] = [Emit(one) for one in told]
        missing = [one for one in told if one.missing != 0]
        if missing and not self._allow_lost:
            text = "; ".join(one.message for one in missing)
            remedy = "The model is kept. allow_lost=True, --allow-lost, says that this is meant"
            error = PeerLostError.__name__
            out.append(
                Emit(
                    FailedEvent(
                        culprit=missing[0].who, error=error, message=f"{text}. {remedy}", traceback=""
                    )
                )
            )
        return out

    def _abort_unaccounted(self) -> list[Instruction]:
        epoch, missing = self._progress.num_unaccounted
        return self.abort(
            self._nodes.worker_names[0],
            "InternalError",
            f"every worker has finished, but {missing} batches of data epoch "
            f"{epoch} have no receipt: a strategy must push the gradient of each of its batches",
        )
