"""A node's side of membership: it joins, beats, hears notices, and learns how the run ended.

Shards and workers use the same `Member`. What it reports goes out in beats, in order and each
once; it is with the coordinator at the latest when `leave` has returned.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gradstream.coordinator.client.lifeline import EvictedError, Lifeline
from gradstream.coordinator.client.presence import Presence
from gradstream.coordinator.event_gate import in_beats
from gradstream.coordinator.receipts import receipt_of, ref_of
from gradstream.data.base import BatchRef
from gradstream.data.reassignment import Block, Epoch
from gradstream.data.shares import WorkerSpeed
from gradstream.errors import ClosedError, DeadlineError, GradstreamError, InternalError, PeerLostError
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.wakeup import Wakeup
from gradstream.telemetry.events import CarriersEvent, Event, encode
from gradstream.transport.base import Endpoint, Priority
from gradstream.transport.stream import EXPIRED
from gradstream.wire import v1
from gradstream.wire.dtypes import itemsize_bytes

__all__ = ["Assigned", "Member", "RunAbortedError", "RunStoppedError", "names_of"]


class RunAbortedError(GradstreamError):
    """The coordinator has ended the run because of a node, this or another.

    Args:
        culprit: name of the node.
        reason: what happened to it.
    """

    def __init__(self, culprit: str, reason: str) -> None:
        super().__init__(f"the run was aborted because of {culprit}: {reason}")
        self.culprit = culprit
        self.reason = reason


class RunStoppedError(GradstreamError):
    """Somebody has asked the run to stop, and it did; it can be resumed."""


class Assigned(NamedTuple):
    """What a worker is told that has asked for minibatches.

    Args:
        refs: minibatches to go through. None: there is nothing for it now.
        complete: there will be none any more.
        interval: of the worker, where it may be held back: then they are its own no longer.
    """

    refs: Sequence[BatchRef]
    complete: bool
    interval: int = 0


class Member:
    """One node as a member of the run.

    Args:
        runtime: time and tasks.
        endpoint: started; its epoch, fingerprint and addresses follow the notices.
        node: who this is.
        software: version of gradstream.
        coordinator: name under which the endpoint knows the coordinator.
        deadlines: bound the silence of either side.
        beat_s: how long reports are gathered before they are sent.
        earlier_s: of the run's time before it was resumed.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        node: v1.Node,
        *,
        software: str,
        coordinator: str = "coordinator",
        deadlines: Deadlines | None = None,
        beat_s: float = 0.25,
        earlier_s: float = 0.0,
    ) -> None:
        self.node = node
        self.notice = v1.Notice()
        self._runtime = runtime
        self._endpoint = endpoint
        self._software = software
        self._coordinator = coordinator
        self._deadlines = deadlines or Deadlines()
        self._beat_s = min(beat_s, self._deadlines.beat_s)
        self._earlier_s = earlier_s
        self._listeners: list[Callable[[v1.Notice], None]] = []
        self._training_ns: int | None = None
        self._events: list[bytes] = []
        self._beat = v1.Beat()
        self._urgent = Wakeup()
        self._error: GradstreamError | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._presence: Presence | None = None
        self._attending: asyncio.Task[None] | None = None
        self._num_asks = 0

    # ---- joining ------------------------------------------------------------------------

    async def join(
        self,
        model: v1.ModelSpec | None = None,
        tensors: Iterable[v1.TensorSpec] = (),
        buffers: Iterable[v1.TensorSpec] = (),
        fixed: Iterable[v1.TensorSpec] = (),
    ) -> v1.Notice:
        """Joins, and returns the coordinator's first notice.

        Args:
            model: what this worker has built; shards join without.
            tensors, buffers, fixed: the model's, for checkpoints.

        Raises:
            RefusedError: the coordinator does not want this node, and says why.
            PeerLostError, DeadlineError: the coordinator cannot be reached.
        """
        request = v1.Join(node=self.node, model=model, software=self._software)
        request.tensors.extend(tensors)
        request.buffers.extend(buffers)
        request.fixed.extend(fixed)
        stream = await self._endpoint.open(self._coordinator, "join", request, priority=Priority.CONTROL)
        self._presence = Presence(self._runtime, self._endpoint, self._coordinator, stream, self._deadlines)
        await self._hear(self._presence)
        self._attending = self._runtime.spawn(
            self._be_present(self._presence), name=f"{self.node.name}/presence"
        )
        return self.notice

    async def training(self) -> v1.Notice:
        """Waits until everybody is in, and returns a notice with the roster and the model.

        Raises:
            RunAbortedError: it never came to it.
            PeerLostError: the coordinator was lost.
        """
        await self._until(lambda: self.notice.phase in (v1.Notice.TRAINING, v1.Notice.FINISHED))
        return self.notice

    async def over(self) -> v1.Notice:
        """Waits for the end of the run, and returns the FINISHED notice.

        Raises:
            RunAbortedError: names who is to blame, and why.
            PeerLostError: the coordinator was lost.
        """
        await self._until(lambda: self.notice.phase == v1.Notice.FINISHED)
        return self.notice

    async def heard(self, reached: Callable[[], bool]) -> None:
        """Waits until something holds that a notice decides. Raises as `over` does."""
        await self._until(reached)

    def listen(self, listener: Callable[[v1.Notice], None]) -> None:
        """Calls with each notice that brings news, as it comes."""
        self._listeners.append(listener)

    async def leave(self) -> None:
        """Says what is left to say and goodbye, and waits until it was heard: as long as for the coordinator.

        Never raises. Before the end of the run, leaving counts as being lost.
        """
        if self._presence is None or self._attending is None:
            return
        if self.notice.phase < v1.Notice.FINISHED:
            self._attending.cancel()
        try:
            await self._runtime.within(
                self._deadlines.patience_s, self._say_goodbye(self._presence, self._attending)
            )
        except (GradstreamError, TimeoutError):
            pass  # the coordinator is gone, nobody is left to tell

    async def _say_goodbye(self, presence: Presence, attending: asyncio.Task[None]) -> None:
        try:
            await attending
        except asyncio.CancelledError:
            if not attending.cancelled():
                raise
        await self._send_beat(presence)
        await presence.end()

    # ---- reporting ----------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Puts a record into the run's events: in the next beat."""
        time_s = self._earlier_s
        if self._training_ns is not None:
            time_s += (self._runtime.now() - self._training_ns) / 1e9
        self._events.append(encode(event, node=self.node.name, time_s=time_s))

    def hurry(self) -> None:
        """What has been reported so far goes out at once."""
        self._urgent.ring()

    def receipt(self, refs: Iterable[BatchRef]) -> None:
        """These batches are in the model: their pushes were acknowledged by all shards."""
        self._beat.receipts.extend(receipt_of(ref) for ref in refs)

    def begun(self, epoch: Epoch, step: int, *, unclear: bool = False) -> None:
        """This worker's own loop begins an epoch of a loader: see `Reassignment.begun`."""
        self._beat.begun.append(v1.Begun(loader=epoch.loader, epoch=epoch.number, step=step, unclear=unclear))

    def report(self, report: v1.SnapshotReport) -> None:
        """Says how far this node is with a snapshot: at once, behind the receipts of before."""
        self._beat.snapshots.append(report)
        self._urgent.ring()

    def quiesced(self, number: int) -> None:
        """This worker is held back by the turn of this number, and all that it has begun is in the model."""
        self._beat.quiesced = number
        self._urgent.ring()

    def verdict(self, round: int, ranks: Sequence[int]) -> None:  # noqa: A002  the word of the protocol
        """These workers' contributions make the update of a round: what they had of it is in the model."""
        self._beat.verdicts.append(v1.Verdict(round=round, ranks=ranks))

    def finished(self, *, relies: bool = False) -> None:
        """This worker's strategy is done with all of its batches.

        Args:
            relies: on another worker to keep the final parameters; otherwise they are kept.
        """
        self._beat.finished, self._beat.relies = True, relies
        self._urgent.ring()

    async def failed(self, error: BaseException, traceback_text: str) -> None:
        """This node cannot go on: the run is aborted, naming it. Never raises.

        A lost peer is left to the coordinator to judge first: it knows who was lost, and whether
        the run ends because of it. Only if it is there, and finds no fault with anybody for a lease, is this
        node's word taken.
        """
        if self._presence is None or isinstance(error, RunAbortedError | RunStoppedError):
            return
        if isinstance(error, PeerLostError | DeadlineError) and await self._judged():
            return
        self._beat.failure.CopyFrom(
            v1.Failure(error=type(error).__name__, message=str(error), traceback=traceback_text)
        )
        try:
            await self._send_beat(self._presence)
        except GradstreamError:
            pass  # the coordinator is gone: `over` says so

    async def _judged(self) -> bool:
        """Whether the end of the run is heard of within the time in which a loss is noticed."""
        assert self._presence is not None
        while True:
            try:
                await self._runtime.within(self._deadlines.lease_s + self._deadlines.beat_s, self.over())
            except TimeoutError:
                if self._runtime.left_s(self._presence.heard_ns, 2 * self._deadlines.notice_s) > 0:
                    return False
                continue  # it is silent: it judges when it is there again
            except GradstreamError:
                pass
            return True

    async def assign(self, wait: bool, in_hand: int, measured: WorkerSpeed) -> Assigned:
        """Asks for minibatches to go through.

        Args:
            wait: there is nothing left to do: for minibatches, or until the run has none any more.
            in_hand: how many are not in the model yet.
            measured: what was computed since this was asked before.

        Raises:
            PeerLostError, DeadlineError: the coordinator was lost.
        """
        self._urgent.ring()  # own receipts first: others may wait for them
        self._num_asks += 1
        request = v1.Ask(
            number=self._num_asks,
            wait=wait,
            in_hand=in_hand,
            rounds=measured.rounds,
            samples=measured.samples,
            seconds=measured.seconds,
            squares=measured.squares,
        )
        answer = await self._ask(request)
        return Assigned([ref_of(receipt) for receipt in answer.batches], answer.complete, answer.interval)

    async def _ask(self, request: v1.Ask) -> v1.Assigned:
        """Asks again where no answer comes, over a new connection, as long as for the coordinator."""
        lease_s, silent_s = self._deadlines.lease_s, 0.0
        while True:
            begun_ns = self._runtime.now()
            try:
                return await self._endpoint.call(
                    self._coordinator,
                    "assign",
                    request,
                    v1.Assigned,
                    silence_s=lease_s,
                    new_connection=silent_s > 0.0,
                )
            except DeadlineError:
                took_s = (self._runtime.now() - begun_ns) / 1e9
                silent_s = silent_s + took_s if took_s < lease_s + self._deadlines.notice_s else took_s
                if silent_s >= self._deadlines.patience_s:
                    raise

    async def ending(self, batches: int, samples: int, next_round: int) -> bool:
        """Says that this worker has no minibatches left, and returns whether the run is over for it.

        False asks for its part, without samples, in `next_round`. Waits for the others where it must.

        Raises:
            PeerLostError, DeadlineError: the coordinator was lost.
        """
        self._urgent.ring()  # own receipts first: others may wait for them
        answer = await self._endpoint.call(
            self._coordinator,
            "ending",
            v1.Ending(batches=batches, samples=samples, round=next_round),
            v1.Ended,
            silence_s=self._deadlines.patience_s,
        )
        return answer.over

    async def take_over(
        self, epoch: Epoch, begin: int, step: int, parts: Sequence[int], per_step: int, oldest: int
    ) -> Block | None:
        """Asks for minibatches that lost workers have left: see `Reassignment.take`.

        Raises:
            PeerLostError, DeadlineError: the coordinator was lost.
        """
        answer = await self._endpoint.call(
            self._coordinator,
            "take_over",
            v1.TakeOver(
                epoch=v1.Begun(loader=epoch.loader, epoch=epoch.number, step=begin),
                oldest=oldest,
                parts=parts,
                per_step=per_step,
                step=step,
            ),
            v1.TakenOver,
            silence_s=self._deadlines.patience_s,
        )
        block = Block(Epoch(epoch.loader, answer.epoch), answer.rank, answer.first, answer.count)
        return block if answer.count else None

    async def shares(self, ref: BatchRef, measured: WorkerSpeed) -> list[int]:
        """How many samples of a round each worker takes from `ref`'s round on. Waits for all of them to ask.

        Args:
            measured: what this worker's gradients took since this was asked before.

        Raises:
            PeerLostError, DeadlineError: the coordinator was lost.
        """
        answer = await self._endpoint.call(
            self._coordinator,
            "shares",
            v1.Took(epoch=ref.epoch, batch=ref.batch, **dataclasses.asdict(measured)),
            v1.Shares,
            silence_s=self._deadlines.patience_s,
        )
        return list(answer.samples)

    # ---- presence -----------------------------------------------------------------------

    async def _be_present(self, presence: Presence) -> None:
        lifeline = Lifeline(
            self._runtime,
            self._endpoint,
            self._coordinator,
            presence,
            self._deadlines,
            lambda error: self._lose(presence, error),
        )
        watching = self._runtime.spawn(lifeline.run(), name=f"{self.node.name}/lifeline")
        try:
            await self._runtime.gather(self._keep_hearing(presence), self._keep_beating(presence))
        except (RunAbortedError, RunStoppedError):
            pass  # noted where it was heard
        except ClosedError as error:
            evicted = EXPIRED in str(error)
            self._fail(
                EvictedError(self.node.name, str(error).partition(EXPIRED)[2])
                if evicted
                else PeerLostError(self._coordinator, str(error))
            )
        except GradstreamError as error:
            lost = isinstance(error, PeerLostError)
            self._fail(error if lost else PeerLostError(self._coordinator, str(error)))
        except Exception as error:
            self._fail(InternalError(f"membership of {self.node.name}: {error!r}"))
        finally:
            watching.cancel()

    def _lose(self, presence: Presence, error: GradstreamError) -> None:
        """There is no presence to keep up any more."""
        self._fail(error)
        presence.cancel("this node was evicted, or takes the coordinator for dead")

    def _fail(self, error: GradstreamError) -> None:
        self._error = self._error or error
        self._wake()

    async def _keep_hearing(self, presence: Presence) -> None:
        while await self._hear(presence):
            pass

    async def _hear(self, presence: Presence) -> bool:
        """Takes one notice; False when it was the last."""
        notice = await presence.hear()
        self._follow(notice)
        changed, self.notice = notice != self.notice, notice
        if notice.phase == v1.Notice.ABORTED:
            self._error = RunAbortedError(notice.culprit, notice.reason)
        elif notice.phase == v1.Notice.STOPPED:
            self._error = RunStoppedError("the run was stopped; it can be resumed")
        if changed:
            for listener in self._listeners:
                listener(notice)
            self._wake()
        if self._error is not None:
            raise self._error
        if notice.phase == v1.Notice.FINISHED:
            self._urgent.ring()  # lets go of the beat that waits
            return False
        return True

    def _follow(self, notice: v1.Notice) -> None:
        """What a notice means for this node's endpoint, and for its clock."""
        for node in notice.nodes:
            if node.name != self.node.name:
                self._endpoint.know(node.name, node.address)
        identity = self._endpoint.identity
        identity.epoch = notice.epoch
        if notice.HasField("model"):
            identity.fingerprint = notice.model.fingerprint
            identity.chunk_bytes = notice.model.chunk_elems * itemsize_bytes(notice.model.dtype)
        members = {node.name: node.incarnation for node in notice.nodes}
        self._endpoint.members_changed(members, notice.revoked)
        if self._training_ns is None and notice.phase == v1.Notice.TRAINING:
            self._training_ns = self._runtime.now()
            if self._endpoint.routes:
                self.emit(CarriersEvent(by_peer=dict(self._endpoint.routes)))

    async def _keep_beating(self, presence: Presence) -> None:
        """A beat when there is something to say, and otherwise as a sign of life."""
        silent_s = 0.0
        while self.notice.phase != v1.Notice.FINISHED:
            if await self._urgent.rung(self._runtime, self._beat_s) or self._has_news:
                silent_s = 0.0
                await self._send_beat(presence)
                continue
            silent_s += self._beat_s
            if silent_s >= self._deadlines.beat_s:
                silent_s = 0.0
                await self._send_beat(presence)

    @property
    def _has_news(self) -> bool:
        beat = self._beat
        return bool(
            self._events or beat.receipts or beat.verdicts or beat.finished or beat.snapshots or beat.quiesced
        )

    async def _send_beat(self, presence: Presence) -> None:
        beat, self._beat = self._beat, v1.Beat()
        *earlier, beat.events = in_beats(self._events)
        self._events = []
        for one in [*(v1.Beat(events=events) for events in earlier), beat]:
            await presence.say(one)

    # ---- waiting ------------------------------------------------------------------------

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if self._error is not None:
                raise self._error
            if self._presence is None:
                raise ClosedError(f"{self.node.name} has not joined")
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def names_of(nodes: Iterable[v1.Node], role: str) -> list[str]:
    """Names of the nodes of a role, in the order of ranks."""
    found = (node for node in nodes if node.role == role)
    return [node.name for node in sorted(found, key=lambda node: node.rank)]
