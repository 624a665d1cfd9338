"""`SampleProgress`: counts what is in the model, from receipts and the decisions of a quorum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from typing_extensions import override

from gradstream.checkpoint.manifest import Resume
from gradstream.coordinator.lead import SHARDS, WORKERS, Emit, Instruction, Lead, impossible
from gradstream.coordinator.nodes import Nodes
from gradstream.data.base import BatchRef
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import LostSamples, OpenLedger
from gradstream.data.plan import ids_of
from gradstream.errors import NonFiniteError
from gradstream.telemetry.events import (
    FinishedEvent,
    GradientRefusedEvent,
    LedgerEvent,
    LeftOverEvent,
    ResumedEvent,
    RoundEvent,
)
from gradstream.untrusted import escaped
from gradstream.wire import v1

# ---- receipts ----------------------------------------------------------------------------
# Receipts on the wire, and the minibatches that they name.


def ref_of(receipt: v1.Receipt) -> BatchRef:
    """Returns the minibatch that a receipt names."""
    return BatchRef(receipt.epoch, receipt.partition, receipt.batch, receipt.more + 1)


def receipt_of(ref: BatchRef) -> v1.Receipt:
    """Returns the receipt for a minibatch."""
    return v1.Receipt(epoch=ref.epoch, partition=ref.partition, batch=ref.batch, more=ref.count - 1)


# ---- progress ----------------------------------------------------------------------------

MAX_COUNT = 1 << 53
"""The largest count that is accepted from a member."""


class SampleProgress(Lead):
    """Counts the samples and rounds of a run: the ledger's figures, plus the figures before the run was resumed.

    Args:
        ledger: records which minibatches are in the model.
        num_samples: number of samples in a data epoch; None for a stream, whose samples are not counted.
        resume: where a resumed run continues; None for a new run.
        in_rounds: whether the workers go through rounds.

    Attributes:
        samples_per_epoch: see `num_samples`.
        earlier_s: seconds of training before the run was resumed.
        last_refused: why the latest refused gradient was refused; "" if there is none.
        num_news: number of receipts so far.
    """

    KEPT = ("_num_complete", "last_refused", "_began_s", "_heard_s")
    """See `durable.state`."""

    CACHES = ("num_news",)

    def __init__(
        self,
        ledger: Ledger | OpenLedger,
        num_samples: int | None,
        resume: Resume | None,
        *,
        in_rounds: bool = False,
    ) -> None:
        self.ledger = ledger
        self.in_rounds = in_rounds
        self.samples_per_epoch = num_samples
        self.earlier_s = resume.time_s if resume is not None else 0.0
        self.resume = resume
        self._dropped_before = dict(resume.dropped) if resume is not None else {}
        self._num_complete = ledger.num_complete
        self.last_refused = ""
        self._began_s = 0.0
        self._heard_s = 0.0  # when the latest receipt or decision came
        self.num_news = 0

    # ---- input --------------------------------------------------------------------------

    def begin(self, at_s: float) -> None:
        """Begins the training time."""
        self._began_s = at_s

    def on_beat(self, node: v1.Node, beat: v1.Beat, at_s: float) -> list[Instruction]:
        """Records minibatches that a worker reports to be in the model."""
        for receipt in beat.receipts:
            self.ledger.receipt(ref_of(receipt), node.rank)
        if beat.receipts:
            self.heard(at_s)
        return []

    @property
    def in_loops(self) -> bool:
        """Whether users' own loops bring the data."""
        return isinstance(self.ledger, OpenLedger)

    @property
    def is_ending(self) -> bool:
        """Whether users' own loops have come to the end of their rounds."""
        return isinstance(self.ledger, OpenLedger) and self.ledger.is_ending

    def on_join(self, node: v1.Node, at_s: float) -> list[Instruction]:
        """Allows a worker that replaces a lost one to get minibatches."""
        if node.role == "worker" and isinstance(self.ledger, Ledger):
            self.ledger.leases.rejoined(node.rank)
        elif node.role == "worker" and isinstance(self.ledger, OpenLedger):
            self.ledger.come(node.rank)
        return []

    def on_absent(self, rank: int) -> list[Instruction]:
        """Takes back the minibatches of a worker that has not come."""
        self.ledger.lost(rank)
        return []

    def refused(self, ref: BatchRef, samples: int, what: str, *, whole_round: bool) -> None:
        """Records a minibatch whose gradient will not be in the model, and why.

        Args:
            ref: the minibatch.
            samples: number of its samples.
            what: what is wrong with the gradient.
            whole_round: whether the whole round is skipped with it, for all workers.
        """
        if whole_round and isinstance(self.ledger, Ledger):
            self.ledger.refuse_round(ref)
        else:
            self.ledger.refuse(ref, samples)
        self.last_refused = what

    def heard(self, at_s: float) -> None:
        """Notes when something got its receipt."""
        self._heard_s = at_s
        self.num_news += 1

    @property
    def first_round(self) -> int:
        """Number of the run's first round; not 0 in a resumed run."""
        return self.resume.rounds if self.resume is not None else 0

    def last_version(self, workers: int) -> int:
        """Version of the parameters after the last planned round of this many workers."""
        assert isinstance(self.ledger, Ledger)
        return self.first_round + self.ledger.num_planned // workers

    # ---- figures ------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Rounds in the model, in a run of rounds; otherwise minibatches of all workers."""
        ledger = self.ledger
        before = 0 if self.resume is None else self.resume.step
        return before + (ledger.num_rounds if self.in_rounds else ledger.num_receipts)

    @property
    def num_samples(self) -> int | None:
        """Samples in the model: those with a receipt; None in a stream that does not count them."""
        samples = self.ledger.num_samples
        return None if samples is None else samples + self.num_samples_before

    @property
    def num_samples_before(self) -> int:
        """Samples that were in the model when the run was resumed."""
        return self._samples_before() - sum(self._dropped_before.values())

    @property
    def dropped(self) -> dict[str, int]:
        """By data epoch, how many samples the updates skipped."""
        dropped = dict(self._dropped_before)
        for epoch, count in self.ledger.dropped.items():
            dropped[str(epoch)] = dropped.get(str(epoch), 0) + count
        return dropped

    @property
    def num_unaccounted(self) -> tuple[int, int]:
        """The first incomplete data epoch, and how many of its minibatches have no receipt."""
        return self._num_complete, self.ledger.missing(self._num_complete)

    def brief(self) -> list[LeftOverEvent]:
        """Returns a warning for each user's loop that was too short: see `OpenLedger.brief`."""
        if not isinstance(self.ledger, OpenLedger):
            return []
        left = "of the epoch in which it ended" if self.ledger.dealing.is_used else "of its data"
        return [
            LeftOverEvent(
                who=f"worker-{rank}",
                steps=total,
                missing=None,
                message=f"the loop of worker-{rank} has ended after {total:,} steps, the longest one "
                f"after {longest:,}: what it had left {left} is not in the model",
            )
            for rank, (total, longest) in self.ledger.brief().items()
        ]

    def losses(self) -> list[LeftOverEvent]:
        """Returns what became of the data of lost workers, in a run of the user's own loops."""
        return [_loss(loss) for loss in self.ledger.losses()] if isinstance(self.ledger, OpenLedger) else []

    # ---- records ------------------------------------------------------------------------

    def resumed(self) -> ResumedEvent | None:
        """Returns where a resumed run continues; None for a new run."""
        resume = self.resume
        if resume is None:
            return None
        return ResumedEvent(
            step=resume.step,
            folder=resume.folder,
            steps=dict(resume.steps),
            samples=self.num_samples_before,
            by_worker=dict(resume.samples) if isinstance(self.ledger, OpenLedger) else {},
        )

    def completed(self) -> list[LedgerEvent]:
        """Returns the data epochs completed since the last call."""
        out = []
        while self._num_complete < self.ledger.num_epochs and self.ledger.complete(self._num_complete):
            out.append(self._epoch(self._num_complete))
            if isinstance(self.ledger, Ledger):
                self.ledger.reported(self._num_complete)
            self._num_complete += 1
        return out

    def finished(self, reason: str) -> FinishedEvent:
        """Returns the figures of the whole run.

        Args:
            reason: why the run ended before its last data epoch; "" if it did not.
        """
        return FinishedEvent(
            samples=self.num_samples,
            train_s=max(0.0, self._heard_s - self._began_s + self.earlier_s),
            reason=reason,
            dropped=sum(self.dropped.values()),
        )

    def _epoch(self, epoch: int) -> LedgerEvent:
        samples = self.ledger.samples(epoch)
        return LedgerEvent(
            epoch=epoch,
            samples=None if samples is None else samples + self._samples_before(epoch),
            batches=self.ledger.num_batches(epoch),
            reassigned=self.ledger.reassigned(epoch),
            dropped=self.dropped.get(str(epoch), 0),
        )

    def _samples_before(self, epoch: int | None = None) -> int:
        """Samples accounted for when the run was resumed: of all epochs, or of one."""
        if isinstance(self.ledger, OpenLedger):
            return 0 if self.resume is None else sum(self.resume.samples.values())
        if self.samples_per_epoch is None:
            return 0
        return self.ledger.plan.progress.count(self.samples_per_epoch, epoch)


def _loss(loss: LostSamples) -> LeftOverEvent:
    who = f"worker-{loss.rank}"
    lost = f"{who} was lost" + (
        f" when {loss.steps:,} of its steps were in the model" if loss.is_exact else ""
    )
    if loss.missing == 0:
        text = f"{lost}; the others have taken over all that it had left"
    elif loss.missing is None:
        text = (
            f"{lost}, and what it had left is not in the model. The others can take it over where session.shard has "
            "made the DataLoader, of a data set that is read by number, and a loop uses each minibatch before it takes "
            "the next one"
        )
    else:
        left = f"{loss.missing:,} minibatch{'es' * (loss.missing > 1)} of its part"
        text = f"{lost}. Not in the model: {left}, which nobody has taken over before all loops ended"
    return LeftOverEvent(who=who, steps=loss.steps, missing=loss.missing, message=text)


# ---- decisions of a quorum ---------------------------------------------------------------


class QuorumDecisions(Lead):
    """Records, if receipts do not tell, from which workers' gradients the first shard has made each update.

    Args:
        progress: the minibatches in the model.
        num_workers: number of workers.
    """

    REPORTS: ClassVar = {"decision": SHARDS}

    def __init__(self, progress: SampleProgress, num_workers: int) -> None:
        self._progress = progress
        self._num_workers = num_workers

    @override
    def check(self, node: v1.Node, kind: str, report: v1.Decision) -> None:
        who, ranks, ledger = node.name, list(report.ranks), self._progress.ledger
        if who != "shard-0":
            raise impossible(who, "a decision; expected them from shard-0 alone")
        if not ranks or len(set(ranks)) < len(ranks) or max(ranks) >= self._num_workers:
            raise impossible(
                who, f"a decision of ranks {ranks[:8]}; expected each once, of {self._num_workers}"
            )
        if isinstance(ledger, Ledger) and not ledger.has_round(report.round - self._progress.first_round):
            raise impossible(who, f"a decision on round {report.round}, which this run does not have")

    def on_report(self, node: v1.Node, kind: str, report: v1.Decision, at_s: float) -> list[Instruction]:
        """Records the ranks whose gradients make the update of a round."""
        ledger, ranks = self._progress.ledger, list(report.ranks)
        self._progress.heard(at_s)
        if not isinstance(ledger, Ledger):
            return []
        refs = ledger.record_decision(report.round - self._progress.first_round, ranks)
        numbers = [ids_of(ledger.plan, refs[rank]) for rank in ranks]
        event = RoundEvent(
            round=report.round,
            epoch=refs[0].epoch,
            batch=refs[0].batch,
            accepted=ranks,
            left_out=[rank for rank in range(len(refs)) if rank not in ranks],
            ids=None if None in numbers else [number for ids in numbers if ids for number in ids],
        )
        return [Emit(event)]


# ---- refused gradients -------------------------------------------------------------------
# Refused gradients: gradients that are not finite, and what happens to their workers. A pure state machine.
#
#     a gradient is refused          the run goes on without it
#     `limit` of a worker in a row   the worker is quarantined: it counts as lost from then on
#     likewise, and the newest gradient of every other worker was refused, too:
#                                    the model has diverged, and the run ends
#
# A worker counts its own refused gradients in a row, since it alone knows their order.

WHAT_BYTES = 512
"""Most bytes to keep of what is wrong with a gradient."""


class RefusedGradients(Lead):
    """The refused gradients of all workers.

    Args:
        progress: counts their minibatches as dropped.
        nodes: the members, from which it expels quarantined workers.
        limit: number of consecutive refused gradients after which a worker is quarantined, at least 1.
        abort: ends the run; takes the node, the name of the error, and what happened.
        whole_rounds: whether a refused gradient makes all workers skip the round.
    """

    KEPT = ("_in_a_row",)
    """See `durable.state`."""

    REPORTS: ClassVar = {"refused": WORKERS, "sound": WORKERS}

    def __init__(
        self,
        progress: SampleProgress,
        nodes: Nodes,
        limit: int,
        abort: Callable[[str, str, str], Sequence[Instruction]],
        *,
        whole_rounds: bool = False,
    ) -> None:
        self._progress = progress
        self._nodes = nodes
        self._limit = limit
        self._abort = abort
        self._whole_rounds = whole_rounds
        self._in_a_row: dict[str, int] = {}

    @override
    def check(self, node: v1.Node, kind: str, report: v1.Refused | bool) -> None:
        if isinstance(report, bool):
            return
        ref = ref_of(report.batch)
        if not self._progress.ledger.knows(ref, node.rank):
            raise impossible(node.name, f"a gradient of {ref}, which is no minibatch of this run")
        if max(report.samples, report.step) > MAX_COUNT:
            text = f"a gradient of {report.samples} samples in step {report.step}; expected at most 2^53"
            raise impossible(node.name, text)

    def on_report(
        self, node: v1.Node, kind: str, report: v1.Refused | bool, at_s: float
    ) -> list[Instruction]:
        """Handles a refused gradient, or a report that a worker's newest gradient is finite, which resets its count."""
        who = node.name
        if isinstance(report, bool):
            self._in_a_row.pop(who, None)
            return []
        ref, what = ref_of(report.batch), escaped(report.what, WHAT_BYTES)
        self._progress.refused(ref, report.samples, what, whole_round=self._whole_rounds)
        event = GradientRefusedEvent(
            who=who,
            step=report.step,
            epoch=ref.epoch,
            batch=ref.batch,
            samples=report.samples,
            what=what,
            in_a_row=report.in_a_row,
        )
        diverged = self._count(who, report.in_a_row, what)
        return [Emit(event), *(self._abort(who, NonFiniteError.__name__, diverged) if diverged else ())]

    def _count(self, who: str, in_a_row: int, what: str) -> str:
        """Counts a refused gradient. Returns why it ends the run; "" if the run goes on."""
        self._in_a_row[who] = in_a_row
        if in_a_row < self._limit:
            return ""
        gradients = "its last gradient was" if in_a_row == 1 else f"its last {in_a_row} gradients were"
        self._nodes.expelled[who] = f"quarantined, since {gradients} not finite ({what})"
        workers = self._nodes.worker_names
        if not all(self._in_a_row.get(worker) for worker in workers):
            return ""
        whose = "of every worker" if len(workers) > 1 else "of the worker"
        return (
            f"{what}. The newest gradients {whose} are not finite, {in_a_row} in a row: the model has diverged. Lower "
            "the learning rate, scale the inputs, or clip the gradient. None of them is in the parameters"
        )
