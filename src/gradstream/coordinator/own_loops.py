"""`OwnLoops`, `EpochParts`: reports and requests of workers that run the user's own training loop. Pure.

Their minibatches are not planned: a worker reports which epochs its loaders begin, asks for minibatches that lost
workers have left, and reports when it has none left.
"""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from gradstream.coordinator.lead import WORKERS, Instruction, Lead, Refuse, impossible
from gradstream.coordinator.lifecycle import Lifecycle
from gradstream.coordinator.progress import MAX_COUNT
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import Left, OpenLedger
from gradstream.data.reassignment import Epoch
from gradstream.wire import v1

MOST_EPOCHS_BACK = 1 << 10
"""Number of past epochs of which a worker still knows all minibatches."""


class OwnLoops(Lead):
    """Handles reports and requests of workers with the user's own loops.

    Args:
        ledger: the minibatches of the run.
        life: no answer waits in a run that is over.
    """

    REPORTS: ClassVar = {"begun": WORKERS}

    OTHERS_WAIT = True

    REQUESTS: ClassVar = {"ending": v1.Ending, "take_over": v1.TakeOver}

    def __init__(self, ledger: Ledger | OpenLedger, life: Lifecycle) -> None:
        self._ledger = ledger
        self._life = life

    @property
    def _num_workers(self) -> int:
        ledger = self._ledger
        return ledger.num_workers if isinstance(ledger, OpenLedger) else ledger.plan.num_workers

    @override
    def check(self, node: v1.Node, kind: str, report: v1.Begun) -> None:
        if abs(report.step) > MAX_COUNT:
            raise impossible(node.name, f"an epoch from step {report.step}; expected at most 2^53")

    def on_report(self, node: v1.Node, kind: str, report: v1.Begun, at_s: float) -> list[Instruction]:
        """Records an epoch that the loop of a worker begins."""
        if isinstance(self._ledger, OpenLedger):
            epoch = Epoch(report.loader, report.epoch)
            self._ledger.reassignment.begun(node.rank, epoch, report.step, unclear=report.unclear)
        return []

    def on_request(self, node: v1.Node, request: v1.Ending | v1.TakeOver, at_s: float) -> list[Instruction]:
        """Checks a request."""
        if isinstance(request, v1.TakeOver):
            self.check(node, "begun", request.epoch)
            self._check_take_over(node.name, request)
        elif any(rank >= self._num_workers for rank in (*request.left, *request.contributed)):
            ranks = sorted({*request.left, *request.contributed})[-8:]
            raise impossible(node.name, f"data of workers {ranks}; expected ranks below {self._num_workers}")
        elif (
            max(
                *(request.batches, request.samples, request.round),
                *(*request.left.values(), *request.contributed.values()),
            )
            > MAX_COUNT
        ):
            raise impossible(
                node.name,
                f"an end in round {request.round}, after {request.batches} minibatches of {request.samples} samples; "
                "expected at most 2^53",
            )
        return []

    def _check_take_over(self, who: str, request: v1.TakeOver) -> None:
        """Checks how an epoch is divided among the workers, and how far this worker has come."""
        parts = list(request.parts)
        if (parts or request.per_step) and (len(parts) != self._num_workers or max(parts) > MAX_COUNT):
            raise impossible(
                who, f"parts of {parts[:8]} minibatches; expected {self._num_workers}, one a worker"
            )
        if not request.epoch.step <= request.step <= MAX_COUNT:
            raise impossible(
                who,
                f"an epoch from step {request.epoch.step} to {request.step}; expected an end from there on, up to 2^53",
            )
        if request.oldest > request.epoch.epoch or request.epoch.epoch - request.oldest > MOST_EPOCHS_BACK:
            raise impossible(
                who,
                f"knowledge of epochs {request.oldest} to {request.epoch.epoch}; expected at most "
                f"{MOST_EPOCHS_BACK} epochs back",
            )

    def answer(
        self, node: v1.Node, request: v1.Ending | v1.TakeOver, at_s: float
    ) -> v1.Ended | v1.TakenOver | Refuse | None:
        """Tells a worker without minibatches whether the run is over for it, or gives it some of lost workers."""
        if not isinstance(self._ledger, OpenLedger):
            what = "has run out of data" if isinstance(request, v1.Ending) else "takes minibatches over"
            return Refuse(v1.BAD_REQUEST, f"{node.name} {what} in a run whose minibatches are planned")
        if isinstance(request, v1.Ending):
            left = None
            if request.HasField("own_data"):
                left = Left(request.left, request.own_data, request.contributed)
            over = self._ledger.ended(node.rank, request.batches, request.samples, request.round, left)
            return None if over is None and not self._life.over else v1.Ended(over=bool(over))
        block = self._ledger.reassignment.take(
            node.rank,
            Epoch(request.epoch.loader, request.epoch.epoch),
            request.epoch.step,
            request.step,
            request.parts,
            request.per_step,
            request.oldest,
        )
        if block is None:
            return v1.TakenOver()
        return v1.TakenOver(epoch=block.epoch.number, rank=block.rank, first=block.first, count=block.size)


class EpochParts(Lead):
    """Tells workers that have used up their part of an epoch whether others still take minibatches of it.

    Loops in rounds make equally many: a worker without a minibatch repeats one. Where each worker reads its own part,
    it cannot know how many rounds there are. A worker that is lost, or whose loop has ended, is not waited for.

    Args:
        ledger: the minibatches of the run.
        life: no answer waits in a run that is over.
    """

    OTHERS_WAIT = True

    REQUESTS: ClassVar = {"epoch_part": v1.EpochPart}

    KEPT = ("_taken", "_done")
    """See `coordinator.durable`."""

    MOST_EPOCHS = 64
    """Epochs of all loaders that are known; older ones are over."""

    def __init__(self, ledger: Ledger | OpenLedger, life: Lifecycle) -> None:
        self._ledger = ledger
        self._life = life
        self._taken: dict[tuple[int, int], dict[int, int]] = {}  # by loader and epoch, and by rank
        self._done: dict[tuple[int, int], set[int]] = {}

    def on_request(self, node: v1.Node, request: v1.EpochPart, at_s: float) -> list[Instruction]:
        """Notes how far a worker is."""
        if request.taken > MAX_COUNT:
            raise impossible(node.name, f"{request.taken} minibatches of an epoch; expected at most 2^53")
        key = request.loader, request.epoch
        if key not in self._taken:
            while len(self._taken) >= self.MOST_EPOCHS:
                oldest = next(iter(self._taken))
                del self._taken[oldest], self._done[oldest]
            self._taken[key], self._done[key] = {}, set()
        taken = self._taken[key]
        taken[node.rank] = max(request.taken, taken.get(node.rank, 0)) if request.taken else 0
        if request.done:
            self._done[key].add(node.rank)
        return []

    def answer(self, node: v1.Node, request: v1.EpochPart, at_s: float) -> v1.EpochGoesOn | Refuse | None:
        """Answers a worker that has no more, or tells another one that somebody has no more."""
        if not isinstance(self._ledger, OpenLedger):
            return Refuse(v1.BAD_REQUEST, f"{node.name} reads a part of an epoch that is planned")
        key = request.loader, request.epoch
        if self._life.over or key not in self._taken:
            return v1.EpochGoesOn()
        taken, done, reading = self._taken[key], self._done[key], self._ledger.reading
        if not request.done:
            return v1.EpochGoesOn(more=True) if done or not request.taken else None
        if any(taken.get(rank, 0) > request.taken for rank in reading):
            # All who ask here are told the same, even if that worker is lost now.
            taken[node.rank] = max(request.taken + 1, taken[node.rank])
            return v1.EpochGoesOn(more=True)
        return v1.EpochGoesOn() if done.issuperset(reading) else None
