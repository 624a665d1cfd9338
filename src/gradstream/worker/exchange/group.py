"""A worker's exchange in a group, without servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gradstream.checkpoint.snapshot import NodeSnapshots
from gradstream.collectives.group import Group
from gradstream.runtime.base import Work, awaited_later
from gradstream.strategies.base import GroupStrategy
from gradstream.telemetry.events import Event, ExchangeEvent
from gradstream.wire.chunks import ChunkMap
from gradstream.worker.exchange.base import ExchangeContext, Transfers
from gradstream.worker.replica.group import GroupReplica
from gradstream.worker.replica.snapshot import ReplicaSnapshot

__all__ = ["GroupExchange"]


class GroupExchange:
    """Implements `Exchange`.

    Args:
        context: where it lives.
        strategy: of the run.
        group: all workers of the run.
        replica: makes the replica, which tells of its transfers.
        chunks: the chunk map of a checkpoint's versions, dealt to the workers.
    """

    def __init__(
        self,
        context: ExchangeContext,
        strategy: GroupStrategy,
        group: Group,
        replica: Callable[[Transfers], GroupReplica],
        chunks: ChunkMap,
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._group = group
        self._transfers = Transfers(context.rank, context.member.emit)
        self._accounted = (0, 0)  # rounds and bytes
        self.replica = replica(self._transfers)
        self._snapshot_source = ReplicaSnapshot(self.replica, chunks)
        self._snapshots_task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """The worker of rank 0 makes the first parameters, and all others get them; or each reads its own."""
        context = self._context
        if context.resume is not None:
            folder, storage = context.resume.folder, context.runtime.storage
            work = Work("restore", elems=len(self.replica.parameters))
            await context.runtime.beside(lambda: self._snapshot_source.restore(storage, folder), work=work)
            if self.replica.group.sharded:
                await self.replica.group.all_gather()
        else:
            if context.rank == 0:
                await context.init(self.replica.parameters)
            await self.replica.group.broadcast(self.replica.parameters)
            self.replica.version = 0
        snapshots = NodeSnapshots(context.runtime, context.member, self._snapshot_source)
        name = f"{context.runtime.node}-cuts"
        self._snapshots_task = awaited_later(context.runtime.spawn(snapshots.run(), name=name))

    async def train(self) -> None:
        """See `Exchange`."""
        await self._strategy.train(self.replica)

    async def flush(self) -> None:
        """See `Exchange`: a round is in the model when the strategy goes on from it."""

    async def finish(self) -> None:
        """See `Exchange`: all workers have them."""

    def report(self) -> Sequence[Event]:
        """See `Exchange`: a round is a push and a fetch of the whole gradient."""
        self._transfers.accounted()
        peers = self.replica.group
        rounds, size_bytes = peers.num_rounds - self._accounted[0], peers.exchanged_bytes - self._accounted[1]
        self._accounted = (peers.num_rounds, peers.exchanged_bytes)
        return [
            ExchangeEvent(
                rank=self._context.rank,
                pushed_bytes=size_bytes,
                fetched_bytes=size_bytes,
                pushes=rounds,
                fetches=rounds,
                retries=0,
            )
        ]

    async def close(self) -> None:
        """See `Exchange`: leaves the group."""
        if self._snapshots_task is not None:
            self._snapshots_task.cancel()
        await self._group.close()
