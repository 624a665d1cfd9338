"""A shard's part of a checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from gradstream.checkpoint.manifest import STATE, Manifest
from gradstream.checkpoint.snapshot import Pieces, load
from gradstream.runtime.base import Storage
from gradstream.server.shard.service import ShardService

__all__ = ["ShardSnapshot"]


class ShardSnapshot:
    """Implements `checkpoint.snapshot.SnapshotSource`: a piece is a chunk.

    Args:
        service: the shard's service, with a registered model.
    """

    def __init__(self, service: ShardService) -> None:
        self._service = service

    def pieces(self) -> Mapping[str, Pieces]:
        """See `SnapshotSource`."""
        store = self._service.store
        return {
            name: [(store.chunks.bounds(chunk)[0], store.span(vector, chunk).tensor) for chunk in store.here]
            for name, vector in {"": store.parameters, **store.state}.items()
        }

    def versions(self) -> Sequence[int]:
        """See `SnapshotSource`."""
        return self._service.state.versions()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """See `SnapshotSource`: the shard applies every acknowledged push first. A lost worker's last pushes wait."""
        await self._service.executor.flush()
        async with AsyncExitStack() as turns:
            await turns.enter_async_context(self._service.commands.turn)
            for chunk in self._service.store.here:
                await turns.enter_async_context(self._service.executor.leases.turn(chunk))
            yield

    def restore(self, storage: Storage, folder: str) -> None:
        """Reads the shard's ranges and the versions of its chunks from a checkpoint. Raises what `load` raises."""
        versions = Manifest.decode(storage.read(f"{folder}/{STATE}")).versions
        for chunk, state in self._service.state.chunks.items():
            state.version = versions[chunk]
        if self._service.store.changed is not None:
            self._service.store.changed.restored(dict(enumerate(versions)))
        load(storage, folder, self.pieces())
