"""`Member`: a node's side of membership. It joins, sends beats, receives notices, and learns how the run ended.

Shards and workers use the same `Member`. All its reports have reached the coordinator when `leave` returns.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable

from typing_extensions import override

from gradstream.coordinator.client.presence import EvictedError, Heartbeat, Presence, was_silent
from gradstream.coordinator.client.requests import Reporter, WorkerRequests
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.coordinator.relay import RunClock
from gradstream.errors import (
    ClosedError,
    DeadlineError,
    GradstreamError,
    InternalError,
    PeerCancelledError,
    PeerLostError,
    UserCodeError,
)
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.tasks import Broadcast
from gradstream.telemetry.events import CarriersEvent, DamagedEvent
from gradstream.transport.base import Endpoint, Priority
from gradstream.wire import v1
from gradstream.wire.frames import itemsize_bytes

GATHER_S = 0.25
"""How long reports wait for others to go out in the same beat, if the deadlines allow it."""


class RunAbortedError(GradstreamError):
    """The coordinator has ended the run because of a node, this one or another.

    Args:
        error: name of the class of its exception.
        reason: what happened to it.
    """

    def __init__(self, culprit: str, error: str, reason: str) -> None:
        super().__init__(f"the run was aborted because of {culprit}: {error}: {reason}")
        self.culprit = culprit
        self.error = error
        self.reason = reason


class RunStoppedError(GradstreamError):
    """The run was stopped on request; it can be resumed."""


class BoundaryError(RunStoppedError):
    """The run has come to a boundary: its nodes go on with the next plan.

    Args:
        next_boundary: number of this boundary.
    """

    def __init__(self, next_boundary: int) -> None:
        super().__init__(f"the run has come to boundary {next_boundary}, and goes on with the next plan")
        self.next_boundary = next_boundary


class DrainedError(GradstreamError):
    """This node was asked to leave, and has left the run; the others go on."""


class Member(Reporter):
    """One node as a member of the run.

    Args:
        runtime: time and tasks.
        endpoint: the node's endpoint, started; its epoch, fingerprint and addresses follow the notices.
        node: name, role, rank and address of the node.
        software: version of gradstream.
        deadlines: bound the silence of either side.
        clock: time of the node's events; None for a clock that starts with the training.
        boundary: number of the run's boundary before the plan that the node joins.

    Attributes:
        notice: the coordinator's latest notice.
        requests: the requests of a worker.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        node: v1.Node,
        *,
        software: str,
        deadlines: Deadlines | None = None,
        clock: RunClock | None = None,
        boundary: int = 0,
    ) -> None:
        super().__init__(node.name, clock or RunClock(runtime))
        self.node = node
        self.notice = v1.Notice()
        self._runtime = runtime
        self._endpoint = endpoint
        self._software = software
        self._boundary = boundary
        self._deadlines = deadlines or Deadlines()
        self.requests = WorkerRequests(runtime, endpoint, self._deadlines, self)
        self._listeners: list[Callable[[v1.Notice], None]] = []
        self._error: GradstreamError | None = None
        self._news = Broadcast()
        self._presence: Presence | None = None
        self._attending: asyncio.Task[None] | None = None
        endpoint.on_damage = lambda peer, size_bytes: self.emit(
            DamagedEvent(peer=peer, size_bytes=size_bytes)
        )

    @property
    def since(self) -> int:
        """Membership epoch in which this node joined; 0 if it was there when training began."""
        return next((node.since for node in self.notice.nodes if node.name == self.node.name), 0)

    @property
    def num_heard_receipts(self) -> int:
        """Number of this node's receipts that the coordinator has."""
        return 0 if self._presence is None else self._presence.num_receipts

    @property
    def first_round(self) -> int | None:
        """The round in which this node begins, if it joined late; None while the coordinator has named none."""
        own = next((node for node in self.notice.nodes if node.name == self.node.name), None)
        return own.first_round if own is not None and own.HasField("first_round") else None

    @property
    def evicted(self) -> EvictedError | None:
        """The error of this node if the coordinator counts it as lost; else None."""
        return self._error if isinstance(self._error, EvictedError) else None

    @property
    @override
    def coordinator_comes_back(self) -> bool:
        return self._presence is not None and self._presence.comes_back and self._error is None

    # ---- joining and leaving --------------------------------------------------------------

    async def join(
        self,
        model: v1.ModelSpec | None = None,
        tensors: Iterable[v1.TensorSpec] = (),
        buffers: Iterable[v1.TensorSpec] = (),
        fixed: Iterable[v1.TensorSpec] = (),
    ) -> v1.Notice:
        """Joins, and returns the coordinator's first notice.

        Args:
            model: the model that this worker has built; shards join without one.
            tensors: the trained parameters of the model, for checkpoints.
            buffers: its buffers, for checkpoints.
            fixed: its frozen parameters, for checkpoints.

        Raises:
            RefusedError: the coordinator does not admit this node, and says why.
            PeerLostError, DeadlineError: the coordinator cannot be reached.
        """
        request = v1.Join(
            node=self.node,
            model=model,
            software=self._software,
            tensors=tensors,
            buffers=buffers,
            fixed=fixed,
            boundary=self._boundary,
        )
        # Of an earlier plan: a node that has heard of the next one's may call before this one has.
        self._endpoint.identity.fingerprint = 0
        stream = await self._endpoint.open(COORDINATOR, "join", request, priority=Priority.CONTROL)
        self._presence = Presence(self._runtime, self._endpoint, stream, self._deadlines)
        await self._hear(self._presence)
        self._attending = self._runtime.spawn(
            self._be_present(self._presence), name=f"{self.node.name}/presence"
        )
        return self.notice

    async def training(self) -> v1.Notice:
        """Waits until all nodes have joined, and returns a notice with the members and the model.

        Raises:
            RunAbortedError: the run ended before.
            PeerLostError: the coordinator was lost.
        """
        await self.heard(lambda: self.notice.status in (v1.Notice.TRAINING, v1.Notice.FINISHED))
        return self.notice

    async def over(self) -> v1.Notice:
        """Waits for the end of the run, and returns the FINISHED notice.

        Raises:
            RunAbortedError: the run was aborted. The error names the node at fault, and the reason.
            PeerLostError: the coordinator was lost.
        """
        await self.heard(lambda: self.notice.status == v1.Notice.FINISHED)
        return self.notice

    async def heard(self, reached: Callable[[], bool]) -> None:
        """Waits until `reached()` holds; it is called again after each new notice. Raises as `over` does."""
        while not reached():
            if self._error is not None:
                raise self._error
            if self._presence is None:
                raise ClosedError(f"{self.node.name} has not joined")
            await self._news.wait()

    def listen(self, listener: Callable[[v1.Notice], None]) -> None:
        """Calls `listener` with each notice that differs from the previous one."""
        self._listeners.append(listener)

    def depart(self) -> None:
        """Reports that this worker leaves early; `over` and everything that waits raise DrainedError."""
        self.beat.leaves = True
        self._fail(DrainedError(f"{self.node.name} was asked to go, and has left the run"))

    async def leave(self) -> None:
        """Sends the last reports, says goodbye, and waits until the coordinator has received it.

        Never raises. A node that leaves before the end of the run counts as lost.
        """
        if self._presence is None or self._attending is None:
            return
        if self.notice.status < v1.Notice.FINISHED:
            self._attending.cancel()
        try:
            await self._runtime.within(
                self._deadlines.patience_s, self._say_goodbye(self._presence, self._attending)
            )
        except (GradstreamError, TimeoutError):
            pass  # the coordinator is gone

    async def _say_goodbye(self, presence: Presence, attending: asyncio.Task[None]) -> None:
        try:
            await attending
        except asyncio.CancelledError:
            if not attending.cancelled():
                raise
        await self._send_beats(presence)
        await presence.end()

    async def failed(self, error: BaseException, traceback_text: str) -> None:
        """Reports that this node cannot go on: the coordinator aborts the run and names the node. Never raises.

        A lost peer is left to the coordinator at first, which knows who was lost, and whether that ends the run. This
        node reports it only if the coordinator is there and finds no fault for the length of a lease.
        """
        if self._presence is None or isinstance(error, RunAbortedError | RunStoppedError | DrainedError):
            return
        joined = self._attending is not None  # a node that never got an answer has nobody to wait for
        if isinstance(error, PeerLostError | DeadlineError) and joined and await self._judged():
            return
        self.beat.failure.CopyFrom(
            v1.Failure(
                error=type(error).__name__,
                message=str(error),
                traceback=traceback_text,
                culprit=error.culprit if isinstance(error, UserCodeError) else "",
            )
        )
        try:
            await self._send_beats(self._presence)
        except GradstreamError:
            pass  # the coordinator is gone: `over` says so

    async def _judged(self) -> bool:
        """Waits as long as a loss takes to be noticed, and returns whether the run has ended."""
        try:
            return await self.told(lambda: self.notice.status == v1.Notice.FINISHED)
        except GradstreamError:
            return True

    async def told(self, reached: Callable[[], bool]) -> bool:
        """Waits for as long as a loss takes to be noticed. Returns whether `reached()` holds. Raises as `over` does.

        A silent coordinator is waited for: it decides once it is back.
        """
        assert self._presence is not None
        while True:
            try:
                await self._runtime.within(
                    self._deadlines.lease_s + self._deadlines.beat_s, self.heard(reached)
                )
                return True
            except TimeoutError:
                if self._runtime.left_s(self._presence.heard_ns, 2 * self._deadlines.notice_s) > 0:
                    return False

    # ---- presence -----------------------------------------------------------------------

    async def _be_present(self, presence: Presence) -> None:
        """Sends beats and receives notices until the run is over, or the coordinator is lost."""
        heartbeat = Heartbeat(
            self._runtime,
            self._endpoint,
            presence,
            self._deadlines,
            lambda error: self._lose(presence, error),
        )
        watching = self._runtime.spawn(heartbeat.run(), name=f"{self.node.name}/heartbeat")
        try:
            await self._runtime.gather(self._keep_hearing(presence), self._keep_beating(presence))
        except (RunAbortedError, RunStoppedError):
            pass  # `_hear` has kept it
        except PeerLostError as error:
            self._fail(error)
        except GradstreamError as error:
            if isinstance(error, PeerCancelledError) and was_silent(error):
                self._fail(EvictedError(self.node.name, error.reason))
            else:
                self._fail(PeerLostError(COORDINATOR, str(error)))
        except Exception as error:
            self._fail(InternalError(f"membership of {self.node.name}: {error!r}"))
        finally:
            watching.cancel()

    def _lose(self, presence: Presence, error: GradstreamError) -> None:
        """Ends the presence, which nobody hears any more."""
        self._fail(error)
        presence.cancel("this node was evicted, or takes the coordinator for dead")

    def _fail(self, error: GradstreamError) -> None:
        self._error = self._error or error
        self._news.ring()

    async def _keep_hearing(self, presence: Presence) -> None:
        while await self._hear(presence):
            pass

    async def _hear(self, presence: Presence) -> bool:
        """Takes one notice, and returns False if it was the last. Raises if it ends the run early."""
        notice = await presence.hear()
        again = notice is self.notice
        if not again:
            self._follow(notice)
        changed, self.notice = not again and notice != self.notice, notice
        if notice.status == v1.Notice.ABORTED:
            self._error = RunAbortedError(notice.culprit, notice.error, notice.reason)
        elif notice.status == v1.Notice.STOPPED and notice.next_boundary:
            self._error = BoundaryError(notice.next_boundary)
        elif notice.status == v1.Notice.STOPPED:
            self._error = RunStoppedError("the run was stopped; it can be resumed")
        elif notice.status == v1.Notice.TRAINING and all(
            node.name != self.node.name for node in notice.nodes
        ):
            self._error = self._error or EvictedError(
                self.node.name, "it, or another process of its replica, is no member any more"
            )
        if changed:
            for listener in self._listeners:
                listener(notice)
            self._news.ring()
        if self._error is not None:
            raise self._error
        if notice.status == v1.Notice.FINISHED:
            self._urgent.ring()  # so that `_keep_beating` ends
            return False
        return True

    def _follow(self, notice: v1.Notice) -> None:
        """Tells the endpoint who the members are and which model is trained, and starts the clock with the training."""
        members, own = dict[str, int](), self.node.name
        for node in notice.nodes:
            name = sys.intern(node.name)  # of 2,000 nodes in one process each knows all others
            members[name] = node.incarnation
            if name != own:
                self._endpoint.know(name, sys.intern(node.address))
        identity = self._endpoint.identity
        identity.epoch = notice.epoch
        if notice.HasField("model"):
            identity.fingerprint = notice.model.fingerprint
            identity.chunk_bytes = notice.model.chunk_elems * itemsize_bytes(notice.model.dtype)
        self._endpoint.members_changed(members, notice.revoked)
        if notice.status == v1.Notice.TRAINING and self._clock.begin() and self._endpoint.routes:
            self.emit(CarriersEvent(by_peer=dict(self._endpoint.routes)))

    async def _keep_beating(self, presence: Presence) -> None:
        """Sends a beat when there are reports, and otherwise as a heartbeat."""
        gather_s, silent_s = min(GATHER_S, self._deadlines.beat_s), 0.0
        while self.notice.status != v1.Notice.FINISHED:
            urgent = await self._urgent.rung(self._runtime, gather_s)
            silent_s += gather_s
            if urgent or self._has_news or silent_s >= self._deadlines.beat_s:
                silent_s = 0.0
                await self._send_beats(presence)

    async def _send_beats(self, presence: Presence) -> None:
        for beat in self._take_beats():
            await presence.say(beat)


def names_of(nodes: Iterable[v1.Node], role: str) -> list[str]:
    """Names of the nodes of a role, in the order of ranks."""
    of_role = (node for node in nodes if node.role == role)
    return [node.name for node in sorted(of_role, key=lambda node: node.rank)]
