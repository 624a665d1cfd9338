"""The membership of a node in a replay, where all members are there and the recording replaces the coordinator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from typing_extensions import override

from gradstream.coordinator.client.member import Member
from gradstream.coordinator.client.requests import Assigned, Reporter, WorkerRequests
from gradstream.data.base import BatchRef
from gradstream.data.shares import WorkerSpeed
from gradstream.recording import BatchesAssigned, Entry, SnapshotReached
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.telemetry.events import Event
from gradstream.transport.base import Endpoint
from gradstream.wire import v1


class ReplayedMembers:
    """The members of a recorded run, and the model once a worker has registered it.

    Args:
        notice: the notice when training began, without the model.
        last_worker: name of the worker that kept the final parameters; "" if none did.
    """

    def __init__(self, notice: v1.Notice, last_worker: str) -> None:
        self.notice = notice
        self.last_worker = last_worker
        self._registered = asyncio.Event()

    async def join(self, model: v1.ModelSpec | None) -> v1.Notice:
        """The notice with the model, as soon as a worker has passed it."""
        if model is not None:
            self.notice.model.CopyFrom(model)
            self._registered.set()
        await self._registered.wait()
        return self.notice


class _ReplayedRequests(WorkerRequests):
    """Repeats the coordinator's recorded answers for a worker, and waits forever when there are no more."""

    def __init__(
        self, runtime: Runtime, endpoint: Endpoint, reporter: Reporter, assignments: deque[BatchesAssigned]
    ) -> None:
        super().__init__(runtime, endpoint, Deadlines(), reporter)
        self._assignments = assignments

    @override
    async def assign(self, wait: bool, in_hand: int, measured: WorkerSpeed) -> Assigned:
        if not self._assignments:
            await asyncio.get_running_loop().create_future()
        answer = self._assignments.popleft()
        return Assigned(answer.refs, answer.complete)


class ReplayedMember(Member):
    """A `Member` whose coordinator is the recording.

    Args:
        runtime, endpoint: those of the node.
        members: the members of the run.
        entries: the coordinator's answers that the node recorded.
        on_failed: called with the node's name and error when the node fails.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        members: ReplayedMembers,
        entries: Iterable[Entry],
        on_failed: Callable[[str, BaseException], None],
    ) -> None:
        node = next(node for node in members.notice.nodes if node.name == endpoint.identity.name)
        super().__init__(runtime, endpoint, node, software="")
        self._members = members
        self._first = v1.Notice()
        assignments = deque(entry for entry in entries if isinstance(entry, BatchesAssigned))
        self.requests = _ReplayedRequests(runtime, endpoint, self, assignments)
        self._pauses = deque(entry for entry in entries if isinstance(entry, SnapshotReached))
        self._on_failed = on_failed
        self._ended = False
        self._changed = asyncio.Event()

    @override
    async def join(
        self,
        model: v1.ModelSpec | None = None,
        tensors: Iterable[v1.TensorSpec] = (),
        buffers: Iterable[v1.TensorSpec] = (),
        fixed: Iterable[v1.TensorSpec] = (),
    ) -> v1.Notice:
        self._first.CopyFrom(await self._members.join(model))
        self._follow(self._first)
        self._publish()
        return self.notice

    async def training(self) -> v1.Notice:
        """See `Member`: returns at once."""
        return self.notice

    async def over(self) -> v1.Notice:
        """Waits forever: a replay ends when its shards have repeated every recorded event."""
        await asyncio.get_running_loop().create_future()
        return self.notice

    @override
    async def heard(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._changed.clear()
            await self._changed.wait()

    async def leave(self) -> None:
        """Does nothing, since there is no coordinator."""

    def emit(self, event: Event) -> None:
        """Does nothing: a replay keeps no events."""

    def hurry(self) -> None:
        """Does nothing, since there is no coordinator."""

    def receipt(self, refs: Iterable[BatchRef]) -> None:
        """Does nothing: the recording knows which minibatches are in the model."""

    def report(self, report: v1.BeatReport, *, soon: bool = True) -> None:
        """After a worker has reached a snapshot, publishes the next one, or the end if that was the last."""
        reached = report.HasField("snapshot") and report.snapshot.kind == v1.SnapshotReport.REACHED
        if not reached or self._ended:
            return
        pause = self._pauses[0]
        self._ended = pause.ends
        if not self._ended:
            self._pauses.popleft()
        self._publish()

    def finished(self, *, relies: bool = False) -> None:
        """Removes the workers of lower ranks if this one kept the final parameters: they had left by then."""
        if relies and self.node.name == self._members.last_worker:
            gone = [
                node for node in self._first.nodes if node.role == "worker" and node.rank < self.node.rank
            ]
            for node in gone:
                self._first.nodes.remove(node)
            self._publish()

    @override
    async def failed(self, error: BaseException, traceback_text: str) -> None:
        self._on_failed(self.node.name, error)

    def _publish(self) -> None:
        """Sends listeners the current notice, with the next recorded pause of this worker as a snapshot."""
        notice = v1.Notice()
        notice.CopyFrom(self._first)
        if self._pauses:
            pause = self._pauses[0]
            number = self.notice.snapshot.number + 1
            stage = v1.Snapshot.ENDED if self._ended else v1.Snapshot.STOP
            snapshot = v1.Snapshot(number=number, stage=stage, ends=pause.ends)
            snapshot.stop_at[self.node.name] = pause.begun
            notice.snapshot.CopyFrom(snapshot)
        self.notice = notice
        for listener in self._listeners:
            listener(notice)
        self._changed.set()
