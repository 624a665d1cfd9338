"""A shard's node: it joins, serves until the run is over or other shards have its chunks, and reports its work."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from typing_extensions import override

from gradstream.checkpoint.snapshot import NodeSnapshots, SnapshotMember
from gradstream.runtime.base import Runtime, Work, awaited_later
from gradstream.server.aggregation import rank_of
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.event_schedule import ShardRecorder
from gradstream.server.shard.service import ShardService
from gradstream.server.shard.state import QuorumDecision
from gradstream.telemetry.events import AppliedEvent, Event, RestoredEvent
from gradstream.transport.base import Endpoint
from gradstream.wire import v1
from gradstream.wire.chunks import Placement, member_name, part_map_of, part_of, role_of_part

REPORT_EVERY_S = 1.0


class ShardMembership(SnapshotMember, Protocol):
    """The part of `gradstream.coordinator.Member` that a shard needs. This package cannot import that one."""

    def listen(self, listener: Callable[[v1.Notice], None]) -> None:
        """Calls `listener` with each new notice."""
        ...

    async def join(self, model: v1.ModelSpec | None = None) -> v1.Notice:
        """Joins the run. Returns the first notice."""
        ...

    async def training(self) -> v1.Notice:
        """Returns the notice with which training begins, once all nodes have joined."""
        ...

    async def leave(self) -> None:
        """Leaves the run."""
        ...

    async def failed(self, error: BaseException, traceback_text: str) -> None:
        """Reports that this node cannot continue."""
        ...

    def emit(self, event: Event) -> None:
        """Adds a record to the run's events."""
        ...

    @override
    def report(self, report: v1.BeatReport, *, soon: bool = True) -> None: ...

    @property
    def since(self) -> int:
        """Membership epoch in which this process has joined; 0 if it was there when training began."""
        ...


class ShardNode:
    """One shard. `run` returns when the run is over, and raises the error that ended it early."""

    def __init__(
        self, runtime: Runtime, endpoint: Endpoint, member: ShardMembership, config: ShardConfig
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._member = member
        self._config = config
        self._service = ShardService(runtime, endpoint, config)
        self._recorder = config.schedule if isinstance(config.schedule, ShardRecorder) else None
        self._reported: Counter[str] = Counter()
        self._late_s: dict[str, float] = {}
        self._members: dict[str, int] = {}  # incarnation of each member, by name

    async def run(self) -> None:
        """Joins, serves, and leaves."""
        try:
            await self._member.join()
            notice = await self._member.training()
            placement = self._placement_in(notice)
            if placement is None:  # a change of shards for which this one was started has failed
                return
            if placement.first:  # not the one of the plan
                self._config = replace(self._config, first=placement.first, num_shards=placement.shards)
                self._service.place(placement)
            place = part_map_of(notice.model, self._config.part)
            model = v1.ModelSpec()
            model.CopyFrom(notice.model)
            model.elems = place.elems
            self._service.register(model, opens=False)
            copies = self._service.copies
            copies.part = place if notice.model.parts else None
            restored = False
            if self._holds(notice):
                restored = await self._begin()
            elif not await self._take_over(placement):
                return
            self._service.kept_pushes.on_report = lambda pushes: self._member.report(
                v1.BeatReport(orphaned=pushes)
            )
            self._service.on_event = self._member.emit
            self._keep_members(self._member.notice)
            self._member.listen(self._keep_members)
            self._service.open()
            if restored:
                self._member.emit(RestoredEvent(rank=self._config.rank, chunks=copies.num_restored))
            tasks = self._agree()
            snapshots = NodeSnapshots(self._runtime, self._member, copies).run()
            tasks.append(
                awaited_later(self._runtime.spawn(snapshots, name=f"{self._runtime.node}-snapshots"))
            )
            tasks.append(self._runtime.spawn(self._keep_reporting(), name=f"{self._runtime.node}-reports"))
            failed = self._runtime.spawn(self._service.failed(), name=f"{self._runtime.node}-failed")
            try:
                await self._over(failed)
            finally:
                for task in tasks:
                    task.cancel()
                self._report()
            if copies.place is not None and not self._holds(self._member.notice):
                await copies.place.clear()
            if self._recorder is not None:
                self._recorder.close(self._service.store.parameters_of)
        except Exception as error:
            await self._member.failed(error, "".join(traceback.format_exception(error)))
            raise
        finally:
            if self._recorder is not None:
                self._recorder.log.flush()
            await self._member.leave()

    async def _begin(self) -> bool:
        """Begins with the checkpoint and the backup that there are. Returns whether there was a backup to read."""
        copies, member = self._service.copies, self._member
        if not member.notice.placement.first:  # later shards have begun with the chunks of others
            await self._restore()
        if copies.place is None:
            return False
        if not member.since:
            await copies.place.clear()
            return False
        await copies.restore(copies.place.load, _incarnations(member.notice))
        return True

    # ---- other shards -------------------------------------------------------------------

    def _placement_in(self, notice: v1.Notice) -> Placement | None:
        """The placement of this shard: the current one, or the one that the run prepares for; None for neither."""
        found = map(Placement.of, (notice.placement, notice.resharding.to))
        return next((one for one in found if self._config.rank in one), None)

    def _holds(self, notice: v1.Notice) -> bool:
        """Whether this shard is one of those that hold the parameters."""
        return self._config.rank in Placement.of(notice.placement)

    async def _take_over(self, placement: Placement) -> bool:
        """Gets the chunks of this new shard when the others hand over. Returns whether it is to hold them."""
        member, first = self._member, placement.first

        def decided() -> bool:
            notice = member.notice
            return notice.status == v1.Notice.FINISHED or notice.resharding.to.first != first

        await member.heard(lambda: member.notice.resharding.holds or decided())
        if not decided():
            taking = self._runtime.spawn(self._take(), name=f"{self._runtime.node}-handover")
            try:
                await member.heard(decided)
            finally:
                taking.cancel()
        return member.notice.status != v1.Notice.FINISHED and self._holds(member.notice)

    async def _take(self) -> None:
        notice, copies = self._member.notice, self._service.copies
        members = _incarnations(notice)
        if copies.place is not None:
            copies.place.follow(members)
        outcome = v1.Resharded(first=self._config.first)
        try:
            await copies.take_over(self._endpoint, Placement.of(notice.placement), members)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
        self._member.report(v1.BeatReport(resharded=outcome))

    def _follow_resharding(self, notice: v1.Notice) -> None:
        """Holds this shard while others get its chunks. It does not continue where these have taken its place."""
        if notice.resharding.holds:
            self._service.copies.hold(Placement.of(notice.resharding.to))
        elif self._holds(notice):
            self._service.copies.thaw()

    # ---- members ------------------------------------------------------------------------

    def _keep_members(self, notice: v1.Notice) -> None:
        """Stops waiting for lost nodes, and frees their state.

        Of a worker whose place another process has taken, the shard may hear only once that process is in: it first
        frees what it keeps of the lost one.
        """
        self._follow_resharding(notice)  # first: what was held belongs to nodes that may be lost now
        role = role_of_part(self._config.part)
        stand_ins = {
            stand_in.rank: member_name(self._config.part, rank_of(stand_in.worker))
            for stand_in in notice.stand_ins
        }
        self._service.inspection.stand_ins = stand_ins
        # Who has joined while the run trains fetches parameters; only of the others, the first brings them.
        since_begin = [node.rank for node in notice.nodes if node.role == role and not node.since]
        self._service.inspection.first = min(since_begin, default=self._config.workers)
        fenced = [one for one in notice.fenced if part_of(one.sender) == self._config.part]
        before, self._members = self._members, _incarnations(notice)
        self._service.copies.members = self._members
        stayed = [
            node for node in notice.nodes if before.get(node.name, node.incarnation) == node.incarnation
        ]
        for members in (stayed, notice.nodes) if len(stayed) < len(notice.nodes) else (notice.nodes,):
            self._service.executor.keep_workers({node.rank for node in members if node.role == role})
            self._service.keep_senders({(node.name, node.incarnation) for node in members}, fenced)
        self._follow_backups(first=not before)

    def _follow_backups(self, *, first: bool) -> None:
        """Makes the whole backup again when a new process of the shard that keeps it has joined.

        The first notice finds it whole, as the coordinator knows: a shard that begins has nothing that its holder
        lacks, and one that comes back has read all that it has.
        """
        place = self._service.copies.place
        holder = None if place is None else place.follow(self._members)
        if holder is not None and not first:
            awaited_later(self._runtime.spawn(self._back_up(holder), name=f"{self._runtime.node}-backup"))

    async def _back_up(self, holder: int) -> None:
        await self._service.copies.keep_all()
        self._member.report(v1.BeatReport(backed_up=holder))

    def parameters_of(self, chunk: int) -> torch.Tensor:
        """See `ShardStore.parameters_of`."""
        return self._service.store.parameters_of(chunk)

    def _decided(self, decision: QuorumDecision) -> None:
        """Reports which workers' pushes make the update of a round."""
        report = v1.BeatReport(decision=v1.Decision(round=decision.round, ranks=decision.ranks))
        self._member.report(report, soon=False)

    def _agree(self) -> list[asyncio.Task[None]]:
        """Starts to agree with the other shards, where updates need that. Returns the tasks of that."""
        service, runtime = self._service, self._runtime
        if service.quorum is not None and self._config.index == 0:
            service.on_decision = self._decided
        return [
            awaited_later(runtime.spawn(one.run(), name=f"{runtime.node}-{one.METHOD}"))
            for one in (service.quorum, service.tensor_sums)
            if one is not None
        ]

    async def _restore(self) -> None:
        """Loads the checkpoint from which the run continues, if there is one."""
        folder, storage = self._config.resume_from, self._runtime.storage
        if folder:
            config, copies = self._config, self._service.copies
            await self._runtime.beside(
                lambda: copies.load_checkpoint(
                    storage, folder, state=config.restores_state, version=config.renumbered
                ),
                work=Work("restore", elems=len(self._service.store.parameters)),
            )

    async def _over(self, failed: asyncio.Task[None]) -> None:
        """Returns when this shard is not needed any more. Raises the error of `failed` as soon as there is one."""
        member = self._member
        ended = member.heard(
            lambda: member.notice.status == v1.Notice.FINISHED or not self._holds(member.notice)
        )
        over = self._runtime.spawn(ended, name=f"{self._runtime.node}-over")
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
            await self._runtime.sleep(REPORT_EVERY_S)
            self._report()
            if self._recorder is not None:
                self._recorder.log.flush()

    def _report(self) -> None:
        """Emits the counts since the last report, and the metrics of this process."""
        counters = self._service.executor.counters
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
                late_s={sender: late_s - before.get(sender, 0.0) for sender, late_s in late.items()},
            )
        )
        for event in self._runtime.process_metrics("shard"):
            self._member.emit(event)


def _incarnations(notice: v1.Notice) -> dict[str, int]:
    return {node.name: node.incarnation for node in notice.nodes}
