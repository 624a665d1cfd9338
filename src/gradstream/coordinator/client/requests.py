"""`Reporter`: a node's reports to the coordinator. `WorkerRequests`: a worker's requests during the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from google.protobuf.message import Message

from gradstream.coordinator.client.presence import REDIAL_S
from gradstream.coordinator.lead import ONCE
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.coordinator.presence_service import in_beats
from gradstream.coordinator.progress import receipt_of, ref_of
from gradstream.coordinator.relay import RunClock
from gradstream.data.base import BatchRef
from gradstream.data.dealing import Epoch, LoopBatch
from gradstream.data.open_ledger import Left
from gradstream.data.shares import WorkerSpeed
from gradstream.errors import DeadlineError, PeerLostError
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.tasks import Wakeup
from gradstream.telemetry.events import Event, encode
from gradstream.transport.base import Endpoint
from gradstream.wire import v1

Answer = TypeVar("Answer", bound=Message)


# ---- reports -----------------------------------------------------------------------------


class Reporter:
    """Takes the reports of one node. They go out in the next beat, in order and once each.

    Args:
        clock: time of its events.

    Attributes:
        beat: the next beat, without its events.
        num_receipts: number of receipts so far.
    """

    def __init__(self, name: str, clock: RunClock) -> None:
        self.beat = v1.Beat()
        self._name = name
        self._clock = clock
        self._events: list[bytes] = []
        self._urgent = Wakeup()
        self.num_receipts = 0

    def emit(self, event: Event) -> None:
        """Adds a record to the events of the run."""
        self._events.append(encode(event, node=self._name, time_s=self._clock.time_s()))

    @property
    def coordinator_comes_back(self) -> bool:
        """Whether a new process replaces a coordinator that has died."""
        return False

    def hurry(self) -> None:
        """Sends the next beat at once."""
        self._urgent.ring()

    def receipt(self, refs: Iterable[BatchRef]) -> None:
        """Reports minibatches that are in the model: all shards have acknowledged their pushes."""
        before = len(self.beat.receipts)
        self.beat.receipts.extend(receipt_of(ref) for ref in refs)
        self.num_receipts += len(self.beat.receipts) - before

    def receipt_soon(self, refs: Iterable[BatchRef]) -> None:
        """Reports them at once: other workers may wait for them."""
        self.receipt(refs)
        self._urgent.ring()

    def report(self, report: v1.BeatReport, *, soon: bool = True) -> None:
        """Reports something to the coordinator's half of a feature.

        Args:
            report: goes out after the receipts so far.
            soon: whether to send the next beat at once.
        """
        kind = report.WhichOneof("of")
        if kind in ONCE:
            for earlier in [earlier for earlier in self.beat.reports if earlier.WhichOneof("of") == kind]:
                self.beat.reports.remove(earlier)
        self.beat.reports.append(report)
        if soon:
            self._urgent.ring()

    def finished(self, *, relies: bool = False) -> None:
        """Reports that this worker's strategy is done with all of its minibatches.

        Args:
            relies: whether this worker relies on another one to write the final parameters.
        """
        self.beat.finished, self.beat.relies = True, relies
        self._urgent.ring()

    @property
    def _has_news(self) -> bool:
        """Whether the next beat should not wait until the coordinator needs a heartbeat."""
        beat = self.beat
        return bool(self._events or beat.receipts or beat.finished or beat.reports)

    def _take_beats(self) -> list[v1.Beat]:
        """Returns what was gathered, as beats of a size that the coordinator accepts."""
        beat, self.beat = self.beat, v1.Beat()
        *earlier, beat.events = in_beats(self._events)
        self._events = []
        return [*(v1.Beat(events=events) for events in earlier), beat]


# ---- requests ----------------------------------------------------------------------------


class Assigned(NamedTuple):
    """The coordinator's answer to a worker that asked for minibatches.

    Args:
        refs: minibatches to go through; none if the coordinator has none for this worker now.
        complete: whether the run has no further minibatches.
    """

    refs: Sequence[BatchRef]
    complete: bool


class WorkerRequests:
    """Makes the requests of one worker to the coordinator.

    All methods raise PeerLostError or DeadlineError if the coordinator is lost.

    Args:
        runtime: supplies the time.
        deadlines: bound the coordinator's silence.
        reporter: reports of the worker. They go out before a request: other workers may wait for them.
    """

    def __init__(
        self, runtime: Runtime, endpoint: Endpoint, deadlines: Deadlines, reporter: Reporter
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._deadlines = deadlines
        self._reporter = reporter
        self._num_asks = 0

    async def assign(self, wait: bool, in_hand: int, measured: WorkerSpeed) -> Assigned:
        """Asks for minibatches.

        Without an answer, the worker asks again over a new connection, until the coordinator counts as
        lost.

        Args:
            wait: whether the worker has nothing left to do: the answer then waits until there are minibatches, or until
                the run has none any more.
            in_hand: number of this worker's minibatches that are not in the model yet.
            measured: what this worker has computed since its last request.
        """
        self._reporter.hurry()
        self._num_asks += 1
        request = v1.Ask(number=self._num_asks, wait=wait, in_hand=in_hand, **dataclasses.asdict(measured))
        lease_s, silent_s = self._deadlines.lease_s, 0.0
        while True:
            begun_ns = self._runtime.now()
            try:
                answer = await self._endpoint.call(
                    COORDINATOR,
                    "assign",
                    request,
                    v1.Assigned,
                    silence_s=lease_s,
                    new_connection=silent_s > 0.0,
                )
            except PeerLostError:
                if not await self._comes_back():
                    raise
                silent_s = silent_s or 1e-9  # over a new connection
            except DeadlineError:
                took_s = (self._runtime.now() - begun_ns) / 1e9
                silent_s = silent_s + took_s if took_s < lease_s + self._deadlines.notice_s else took_s
                if silent_s >= self._deadlines.patience_s:
                    raise
            else:
                refs = [ref_of(receipt) for receipt in answer.batches]
                return Assigned(refs, answer.complete)

    async def shares(self, ref: BatchRef, measured: WorkerSpeed) -> list[int]:
        """Asks how many samples each worker takes of each round, from the round of `ref` on.

        The answer waits until all workers have asked, except inside a window, where a new process asks alone.

        Args:
            ref: first minibatch of the round.
            measured: what this worker has computed since its last request.
        """
        request = v1.Took(epoch=ref.epoch, batch=ref.batch, **dataclasses.asdict(measured))
        return list((await self._call("shares", request, v1.Shares)).samples)

    # ---- loops of the user's own ----------------------------------------------------------

    async def ending(self, batches: int, samples: int, next_round: int, left: Left | None = None) -> bool:
        """Reports that this worker has no minibatches left, and returns whether the run is over for it.

        If it returns False, the worker takes part in `next_round` without samples. If the answer depends on the
        other workers, it waits for them.

        Args:
            batches: number of minibatches that the worker has gone through.
            samples: number of samples in them.
            next_round: number of the next round.
            left: what lost workers had left of the data; None if the worker does not know.
        """
        self._reporter.hurry()
        request = v1.Ending(batches=batches, samples=samples, round=next_round)
        if left is not None:
            request.left.update(left.batches)
            request.own_data = left.own_data
            request.contributed.update(left.contributed)
        return (await self._call("ending", request, v1.Ended)).over

    async def draw(self, request: v1.Draw) -> tuple[list[LoopBatch], int]:
        """Asks which minibatches this worker's loop takes next, and says what it does with those that it has.

        Returns:
            (the minibatches, how many more are in its own part of the epoch).
        """
        answer = await self._call("draw", request, v1.Drawn)
        return [LoopBatch(Epoch(request.loader, one.epoch), one.place) for one in answer.places], answer.rest

    async def epoch_part(self, epoch: Epoch, taken: int, *, done: bool) -> bool:
        """Reports how many minibatches this worker has taken of an epoch of which each worker reads its own part.

        Args:
            epoch: the epoch of a loader.
            taken: number of minibatches, with repeated ones.
            done: it has no more. The answer then waits until it is known whether others have; else until one has none.

        Returns:
            If `done`, whether the worker repeats one more minibatch, since others have more.
        """
        request = v1.EpochPart(loader=epoch.loader, epoch=epoch.number, taken=taken, done=done)
        return (await self._call("epoch_part", request, v1.EpochGoesOn)).more

    async def _call(self, method: str, request: Message, answer: type[Answer]) -> Answer:
        silence_s, again = self._deadlines.patience_s, False
        while True:
            try:
                return await self._endpoint.call(
                    COORDINATOR, method, request, answer, silence_s=silence_s, new_connection=again
                )
            except PeerLostError:
                if not await self._comes_back():
                    raise
                again = True

    async def _comes_back(self) -> bool:
        """Waits a moment before a request to a dead coordinator is repeated; False if that is in vain."""
        if not self._reporter.coordinator_comes_back:
            return False
        await self._runtime.sleep(min(REDIAL_S, self._deadlines.beat_s))
        return True
