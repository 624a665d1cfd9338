"""A shard's node: joins, serves until every worker has left, and reports what it has done."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from gradstream.checkpoint.snapshot import NodeSnapshots
from gradstream.runtime.base import Runtime, Work, awaited_later
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.recorder import ShardRecorder
from gradstream.server.shard.service import ShardService
from gradstream.server.shard.snapshot import ShardSnapshot
from gradstream.telemetry.events import AppliedEvent, Event
from gradstream.transport.base import Endpoint
from gradstream.wire import v1

__all__ = ["ShardMembership", "ShardNode"]

VITALS_EVERY_S = 1.0


class ShardMembership(Protocol):
    """What a shard needs of `gradstream.coordinator.Member`, which lives beside this room."""

    notice: v1.Notice

    async def heard(self, reached: Callable[[], bool]) -> None:
        """Waits until something holds that a notice decides."""
        ...

    def listen(self, listener: Callable[[v1.Notice], None]) -> None:
        """Calls with each notice that brings news."""
        ...

    def report(self, report: v1.SnapshotReport) -> None:
        """Says how far this node is with a snapshot."""
        ...

    async def join(self, model: v1.ModelSpec | None = None) -> v1.Notice:
        """Joins the run."""
        ...

    async def training(self) -> v1.Notice:
        """Waits until everybody is in."""
        ...

    async def over(self) -> v1.Notice:
        """Waits for the end of the run; raises when it was aborted."""
        ...

    async def leave(self) -> None:
        """Says goodbye."""
        ...

    async def failed(self, error: BaseException, traceback_text: str) -> None:
        """Says that this node cannot go on."""
        ...

    def emit(self, event: Event) -> None:
        """Puts a record into the run's events."""
        ...

    def verdict(self, round: int, ranks: Sequence[int]) -> None:  # noqa: A002  the word of the protocol
        """Says which contributions make the update of a round."""
        ...


class ShardNode:
    """One shard. `run` returns when the run is over, and raises what ended it early."""

    def __init__(
        self, runtime: Runtime, endpoint: Endpoint, member: ShardMembership, config: ShardConfig
    ) -> None:
        self._runtime = runtime
        self._member = member
        self._config = config
        self._service = ShardService(runtime, endpoint, config)
        self._recorder = config.schedule if isinstance(config.schedule, ShardRecorder) else None
        self._reported: Counter[str] = Counter()
        self._late_s: dict[str, float] = {}

    async def run(self) -> None:
        """Joins, serves, and leaves."""
        try:
            await self._member.join()
            notice = await self._member.training()
            self._service.register(notice.model, opens=False)
            holder = ShardSnapshot(self._service, self._config.rank)
            await self._restore(holder)
            self._hear(self._member.notice)
            self._member.listen(self._hear)
            self._service.open()
            agreeing = self._agree()
            serving = NodeSnapshots(self._runtime, self._member, holder).run()
            snapshots = awaited_later(self._runtime.spawn(serving, name=f"{self._runtime.node}-snapshots"))
            reporting = self._runtime.spawn(self._keep_reporting(), name=f"{self._runtime.node}-vitals")
            failed = self._runtime.spawn(self._service.failed(), name=f"{self._runtime.node}-failed")
            try:
                await self._over(failed)
            finally:
                for task in (reporting, snapshots, *agreeing):
                    task.cancel()
            self._report()
            if self._recorder is not None:
                self._recorder.close(self._service.store.parameters_of)
        except Exception as error:
            await self._member.failed(error, "".join(traceback.format_exception(error)))
            raise
        finally:
            if self._recorder is not None:
                self._recorder.log.flush()
            await self._member.leave()

    def _hear(self, notice: v1.Notice) -> None:
        """Who is lost keeps nobody waiting, and nothing is kept of it."""
        self._service.executor.keep_workers({node.rank for node in notice.nodes if node.role == "worker"})
        self._service.keep_senders({(node.name, node.incarnation) for node in notice.nodes})

    def parameters_of(self, chunk: int) -> torch.Tensor:
        """A chunk's parameters, as they lie here."""
        return self._service.store.parameters_of(chunk)

    def _agree(self) -> list[asyncio.Task[None]]:
        """Keeps up with the other shards, where a quorum makes each update."""
        quorum = self._service.quorum
        if quorum is None:
            return []
        if self._config.rank == 0:
            self._service.on_decision = lambda decision: self._member.verdict(decision.round, decision.ranks)
            return []
        work = quorum.run(self._config.silence_s)
        return [awaited_later(self._runtime.spawn(work, name=f"{self._runtime.node}-quorum"))]

    async def _restore(self, holder: ShardSnapshot) -> None:
        """Goes on from a checkpoint, where the run does."""
        folder, storage = self._config.resume_from, self._runtime.storage
        if folder:
            await self._runtime.beside(
                lambda: holder.restore(storage, folder),
                work=Work("restore", elems=len(self._service.store.parameters)),
            )

    async def _over(self, failed: asyncio.Task[None]) -> None:
        over = self._runtime.spawn(self._member.over(), name=f"{self._runtime.node}-over")
        over.add_done_callback(lambda _: failed.cancel())
        failed.add_done_callback(lambda task: None if task.cancelled() else over.cancel())
        try:
            await over
        except asyncio.CancelledError:
            if failed.done() and not failed.cancelled():
                failed.result()
            raise

    async def _keep_reporting(self) -> None:
        while True:
            await self._runtime.sleep(VITALS_EVERY_S)
            self._report()
            if self._recorder is not None:
                self._recorder.log.flush()

    def _report(self) -> None:
        """Records of what was done since the report before, and of the metrics of this process."""
        counters = self._service.counters
        new = counters - self._reported
        self._reported = Counter(counters)
        late, before = self._service.executor.stragglers.late_s(), self._late_s
        self._late_s = late
        versions = self._service.state.versions() or [0]
        self._member.emit(
            AppliedEvent(
                rank=self._config.rank,
                updates=new["applied"],
                duplicates=new["duplicate"],
                dropped=new["dropped"],
                refused=new["refused"],
                min_version=max(0, min(versions)),
                max_version=max(0, *versions, 0),
                late_s={who: late_s - before.get(who, 0.0) for who, late_s in late.items()},
            )
        )
        for event in self._runtime.process_metrics("shard"):
            self._member.emit(event)
