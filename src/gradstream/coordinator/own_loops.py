"""`OwnLoops`, `EpochParts`: requests of workers that run the user's own training loop. Pure.

Their minibatches are not planned: a worker asks for those that its loop takes, and reports when it has none left.
"""

from __future__ import annotations

from typing import ClassVar

from gradstream.coordinator.lead import Instruction, Lead, Refuse, impossible
from gradstream.coordinator.lifecycle import Lifecycle
from gradstream.coordinator.progress import MAX_COUNT
from gradstream.data.dealing import MOST_IN_HAND, Epoch, LoopBatch
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import Left, OpenLedger
from gradstream.wire import v1


class OwnLoops(Lead):
    """Handles requests of workers with the user's own loops.

    Args:
        ledger: the minibatches of the run.
        life: no answer waits in a run that is over.
    """

    OTHERS_WAIT = True

    REQUESTS: ClassVar = {"ending": v1.Ending, "draw": v1.Draw}

    def __init__(self, ledger: Ledger | OpenLedger, life: Lifecycle) -> None:
        self._ledger = ledger
        self._life = life

    def on_request(self, node: v1.Node, request: v1.Ending | v1.Draw, at_s: float) -> list[Instruction]:
        """Checks a request, and notes what a worker does with the minibatches that it has."""
        if isinstance(request, v1.Draw):
            self._check_draw(node.name, request)
            self._take(node.rank, request)
            return []
        ledger = self._ledger
        workers = ledger.num_workers
        if any(rank >= workers for rank in (*request.left, *request.contributed)):
            ranks = sorted({*request.left, *request.contributed})[-8:]
            raise impossible(node.name, f"data of workers {ranks}; expected ranks below {workers}")
        numbers = request.batches, request.samples, request.round
        if max(*numbers, *request.left.values(), *request.contributed.values()) > MAX_COUNT:
            raise impossible(
                node.name,
                f"an end in round {request.round}, after {request.batches} minibatches of {request.samples} samples; "
                "expected at most 2^53",
            )
        return []

    def _check_draw(self, who: str, request: v1.Draw) -> None:
        numbers = (request.total, *(abs(use.step) + use.samples + use.place for use in request.uses))
        if max(numbers) > MAX_COUNT or request.wanted > MOST_IN_HAND or request.oldest > request.epoch:
            raise impossible(
                who,
                f"{request.wanted} minibatches of an epoch of {request.total}, of epochs {request.oldest} to "
                f"{request.epoch}; expected at most {MOST_IN_HAND} at once, and numbers up to 2^53",
            )

    def _take(self, rank: int, request: v1.Draw) -> None:
        if not isinstance(self._ledger, OpenLedger):
            return
        dealing = self._ledger.dealing
        if request.unclear:
            dealing.is_unclear(rank)
        for use in request.uses:
            place = LoopBatch(Epoch(request.loader, use.epoch), use.place)
            if use.HasField("step"):
                dealing.use(rank, place, use.step, use.samples)
            else:
                dealing.drop(rank, place)
        if request.ended:
            dealing.end_epoch(Epoch(request.loader, request.epoch), request.total)

    def answer(
        self, node: v1.Node, request: v1.Ending | v1.Draw, at_s: float
    ) -> v1.Ended | v1.Drawn | Refuse | None:
        """Tells a worker without minibatches whether the run is over for it, or gives it some."""
        ledger = self._ledger
        if not isinstance(ledger, OpenLedger):
            what = "has run out of data" if isinstance(request, v1.Ending) else "asks which ones to take"
            return Refuse(v1.BAD_REQUEST, f"{node.name} {what} in a run whose minibatches are planned")
        if isinstance(request, v1.Ending):
            left = None
            if request.HasField("own_data"):
                left = Left(request.left, request.own_data, request.contributed)
            over = ledger.ended(node.rank, request.batches, request.samples, request.round, left)
            return None if over is None and not self._life.over else v1.Ended(over=bool(over))
        epoch = Epoch(request.loader, request.epoch)
        asked = request.number, request.wanted
        places = ledger.dealing.deal(node.rank, asked, epoch, request.total, request.oldest)
        waits = request.last and not places and ledger.dealing.waits(node.rank, epoch, request.oldest)
        if waits and not self._life.over and not self._life.pauses:  # a paused worker goes no further
            return None
        uses = [v1.Use(epoch=one.epoch.number, place=one.number) for one in places]
        return v1.Drawn(places=uses, rest=ledger.dealing.rest(node.rank, epoch))


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
