"""A worker's exchange in a group, without servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from gradstream.checkpoint.manifest import STATE, Manifest
from gradstream.checkpoint.snapshot import Pieces, load
from gradstream.runtime.base import Storage, Work
from gradstream.strategies.base import GroupStrategy
from gradstream.telemetry.events import Event, ExchangeEvent
from gradstream.wire.chunks import ChunkMap
from gradstream.worker.exchange.base import Exchange, ExchangeContext, Transfers
from gradstream.worker.replica.group import GroupReplica

__all__ = ["GroupExchange"]


class GroupExchange(Exchange):
    """Implements `Exchange`.

    Args:
        context: the worker's place in the run.
        strategy: strategy of the run.
        replica: makes the replica, which reports its transfers.
        chunks: chunks of the flat vector. A checkpoint has a version for each; the workers divide them.
    """

    replica: GroupReplica

    def __init__(
        self,
        context: ExchangeContext,
        strategy: GroupStrategy,
        replica: Callable[[Transfers], GroupReplica],
        chunks: ChunkMap,
    ) -> None:
        super().__init__(context)
        self._strategy = strategy
        self._transfers = Transfers(context.rank, context.member.emit)
        self._accounted = (0, 0)  # rounds and bytes
        self.replica = replica(self._transfers)
        self._snapshot_source = _GroupSnapshot(self.replica, chunks)

    async def begin(self) -> None:
        """See `Exchange`: the worker of rank 0 makes the first parameters for all; or each reads a checkpoint."""
        context, replica = self._context, self.replica
        if context.resume is not None:
            folder, storage = context.resume.folder, context.runtime.storage
            work = Work("restore", elems=len(replica.parameters))
            await context.runtime.beside(lambda: self._snapshot_source.restore(storage, folder), work=work)
            if replica.setup.sharded:
                await replica.group.all_gather()
        else:
            if context.rank == 0:
                await context.init(replica.parameters)
            await replica.group.broadcast(replica.parameters)
            replica.version = 0
        self._keep_snapshots(self._snapshot_source)

    async def train(self) -> None:
        """See `Exchange`."""
        await self._strategy.train(self.replica)

    def report(self) -> Sequence[Event]:
        """See `Exchange`: a round counts as a push and a fetch of the whole gradient."""
        self._transfers.accounted()
        meter, (rounds, size_bytes) = self.replica.meter, self._accounted
        self._accounted = (meter.num_rounds, meter.exchanged_bytes)
        return [
            ExchangeEvent(
                rank=self._context.rank,
                pushed_bytes=meter.exchanged_bytes - size_bytes,
                fetched_bytes=meter.exchanged_bytes - size_bytes,
                pushes=meter.num_rounds - rounds,
                fetches=meter.num_rounds - rounds,
                retries=0,
            )
        ]

    async def close(self) -> None:
        """See `Exchange`: leaves the group."""
        await super().close()
        await self.replica.setup.group.close()


class _GroupSnapshot:
    """Implements `checkpoint.snapshot.SnapshotSource`: a piece is this worker's slice of a bucket.

    All workers pause after the same round, with the same parameters, so each writes a part of the vectors.

    Args:
        replica: this worker.
        chunks: chunks of the flat vector; this worker reports the versions of its part of them.
    """

    def __init__(self, replica: GroupReplica, chunks: ChunkMap) -> None:
        self._replica = replica
        self._chunks = chunks

    def pieces(self) -> Mapping[str, Pieces]:
        """See `SnapshotSource`."""
        return self._pieces(self._replica.setup.owned)

    def _pieces(self, ranges: Sequence[tuple[int, int]]) -> dict[str, Pieces]:
        """These ranges of the parameters and of the update rule's state."""
        updater, parameters = self._replica.setup.updater, self._replica.parameters.tensor
        pieces: dict[str, Pieces] = {"": [(start, parameters[start:stop]) for start, stop in ranges]}
        for name, vector in updater.state.items():
            pieces[name] = [(start, updater.state_of(vector, start, stop).tensor) for start, stop in ranges]
        return pieces

    def versions(self) -> Sequence[int]:
        """See `SnapshotSource`: the number of rounds in the model."""
        return [self._replica.version] * len(self._chunks.chunks_of(self._replica.rank))

    def still(self) -> AbstractAsyncContextManager[object]:
        """See `SnapshotSource`: only this worker writes the pieces, and it is paused."""
        return nullcontext()

    def restore(self, storage: Storage, folder: str) -> None:
        """Reads the ranges that this worker updates from a checkpoint, with their state. Raises what `load` raises."""
        load(storage, folder, self._pieces(self._replica.setup.updater.ranges))
        versions = Manifest.decode(storage.read(f"{folder}/{STATE}")).versions
        self._replica.version = min(versions, default=0)
