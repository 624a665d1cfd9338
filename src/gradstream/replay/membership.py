"""Membership of a replay: nobody joins or leaves, and what the coordinator had said is said again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from gradstream.coordinator.client.member import Member
from gradstream.coordinator.client.reporter import Reporter
from gradstream.coordinator.client.requests import Assigned, WorkerRequests
from gradstream.data.base import BatchRef
from gradstream.data.shares import WorkerSpeed
from gradstream.recording import Entry, Handed, Stood, Turned
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.telemetry.events import Event
from gradstream.transport.base import Endpoint
from gradstream.wire import v1

__all__ = ["ReplayedMember", "ReplayedMembers"]

Failed = Callable[[str, BaseException], None]


class ReplayedMembers:
    """Who was in, and the model, once a worker has registered it.

    Args:
        notice: without the model.
    """

    def __init__(self, notice: v1.Notice) -> None:
        self.notice = notice
        self._registered = asyncio.Event()

    async def join(self, model: v1.ModelSpec | None) -> v1.Notice:
        """The notice, with the model."""
        if model is not None:
            self.notice.model.CopyFrom(model)
            self._registered.set()
        await self._registered.wait()
        return self.notice


class _ReplayedRequests(WorkerRequests):
    """Gives a worker the coordinator's recorded answers again, and waits forever when there are no more."""

    def __init__(
        self, runtime: Runtime, endpoint: Endpoint, reporter: Reporter, assignments: deque[Handed]
    ) -> None:
        super().__init__(runtime, endpoint, Deadlines(), reporter)
        self._assignments = assignments

    async def assign(self, wait: bool, in_hand: int, measured: WorkerSpeed) -> Assigned:
        """See `WorkerRequests.assign`."""
        if not self._assignments:
            await asyncio.get_running_loop().create_future()
        answer = self._assignments.popleft()
        return Assigned(answer.refs, answer.complete, answer.interval)


class ReplayedMember(Member):
    """A member of a run that was.

    Args:
        runtime, endpoint: of the node.
        members: who was in.
        entries: what the node had noted of what it was told.
        on_failed: told when the node cannot go on.
        keeps: this worker kept the final parameters, whatever became of those of lower ranks.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        members: ReplayedMembers,
        entries: Iterable[Entry],
        on_failed: Failed,
        *,
        keeps: bool = False,
    ) -> None:
        node = next(node for node in members.notice.nodes if node.name == endpoint.identity.name)
        super().__init__(runtime, endpoint, node, software="")
        self._members = members
        self._first = v1.Notice()
        assignments = deque(entry for entry in entries if isinstance(entry, Handed))
        self.requests = _ReplayedRequests(runtime, endpoint, self, assignments)
        self._stands = deque(entry for entry in entries if isinstance(entry, Stood | Turned))
        self._participation = v1.Participation()
        self._on_failed = on_failed
        self._keeps = keeps
        self._ended = False
        self._changed = asyncio.Event()

    async def join(
        self,
        model: v1.ModelSpec | None = None,
        tensors: Iterable[v1.TensorSpec] = (),
        buffers: Iterable[v1.TensorSpec] = (),
        fixed: Iterable[v1.TensorSpec] = (),
    ) -> v1.Notice:
        """Everybody is in."""
        self._first.CopyFrom(await self._members.join(model))
        self._follow(self._first)
        self._say()
        return self.notice

    async def training(self) -> v1.Notice:
        """At once."""
        return self.notice

    async def over(self) -> v1.Notice:
        """Never: a replay ends when its shards have done what was recorded."""
        await asyncio.get_running_loop().create_future()
        return self.notice

    async def heard(self, reached: Callable[[], bool]) -> None:
        """See `Member`: or never."""
        while not reached():
            self._changed.clear()
            await self._changed.wait()

    async def leave(self) -> None:
        """Nobody is there to be told."""

    def emit(self, event: Event) -> None:
        """Events of a replay are not kept."""

    def hurry(self) -> None:
        """Nobody waits for them."""

    def receipt(self, refs: Iterable[BatchRef]) -> None:
        """Which minibatches are in the model, the recording knows."""

    def report(self, report: v1.SnapshotReport) -> None:
        """A snapshot that was reached lets go of the worker, which goes on to the next one, or ends with it."""
        if report.kind != v1.SnapshotReport.REACHED or self._ended:
            return
        stand = self._stands[0]
        self._ended = isinstance(stand, Stood) and stand.ends
        if not self._ended:
            self._stands.popleft()
        if isinstance(stand, Turned):
            interval = v1.Interval(number=stand.number)
            self._participation = v1.Participation(intervals={self.node.name: interval}, phase=stand.phase)
        self._say()

    def verdict(self, round: int, ranks: Sequence[int]) -> None:  # noqa: A002  the word of the protocol
        """Nobody is there to be told."""

    def quiesced(self, number: int) -> None:
        """Nobody is there to be told."""

    def finished(self, *, relies: bool = False) -> None:
        """Who kept the final parameters is the worker of the lowest rank by then."""
        if relies and self._keeps:
            gone = [
                node for node in self._first.nodes if node.role == "worker" and node.rank < self.node.rank
            ]
            for node in gone:
                self._first.nodes.remove(node)
            self._say()

    async def failed(self, error: BaseException, traceback_text: str) -> None:
        """See `Member`."""
        self._on_failed(self.node.name, error)

    def _say(self) -> None:
        """The notice of now: without a snapshot, or with the one that this worker stands at next."""
        notice = v1.Notice()
        notice.CopyFrom(self._first)
        notice.participation.CopyFrom(self._participation)
        if self._stands:
            stand = self._stands[0]
            number = self.notice.snapshot.number + 1
            phase = v1.Snapshot.ENDED if self._ended else v1.Snapshot.STOP
            snapshot = v1.Snapshot(number=number, phase=phase, ends=isinstance(stand, Stood) and stand.ends)
            snapshot.stop_at[self.node.name] = stand.begun
            notice.snapshot.CopyFrom(snapshot)
        self.notice = notice
        for listener in self._listeners:
            listener(notice)
        self._changed.set()
