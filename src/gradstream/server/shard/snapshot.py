"""A shard's part of a checkpoint."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import torch

from gradstream.checkpoint.manifest import STATE, Manifest
from gradstream.checkpoint.snapshot import Pieces, load, unsplit
from gradstream.runtime.base import Storage
from gradstream.server.procedure import swap_accepted
from gradstream.server.shard.passes import ChunkProcedure
from gradstream.server.shard.service import ShardService
from gradstream.wire import v1
from gradstream.wire.parts import PartMap


class ShardSnapshot:
    """Reads a shard's vectors for a checkpoint. Implements `checkpoint.snapshot.SnapshotSource`: each piece is a chunk.

    Args:
        service: the shard's service, with a registered model.
        place: which parameters of a split model the shard's part has; None if the model is not split.
    """

    def __init__(self, service: ShardService, place: PartMap | None = None) -> None:
        self._service = service
        self._place = place

    def pieces(self, holders: Sequence[str] = ()) -> Mapping[str, Pieces]:
        """See `SnapshotSource`."""
        store, known = self._service.store, self._service.state.chunks
        pieces: dict[str, list[tuple[int, torch.Tensor]]] = {name: [] for name in ("", *store.state)}
        for chunk in store.here:
            vectors = {"": store.parameters, **store.state}
            if known[chunk].procedure.accepted:
                swap_accepted(vectors)
            for name, vector in vectors.items():
                pieces[name].append((store.chunks.bounds(chunk)[0], store.span(vector, chunk).tensor))
        if self._place is None:
            return pieces
        return {name: unsplit(those, self._place) for name, those in pieces.items()}

    def versions(self, holders: Sequence[str]) -> Sequence[int]:
        """See `SnapshotSource`."""
        return self._service.state.versions()

    def procedures(self, holders: Sequence[str]) -> Sequence[v1.Procedure]:
        """See `SnapshotSource`."""
        chunks = self._service.state.chunks
        return ChunkProcedure.messages({number: chunk.procedure for number, chunk in chunks.items()})

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """See `SnapshotSource`: the shard applies every acknowledged push first. A lost worker's last pushes wait."""
        await self._service.executor.flush()
        async with AsyncExitStack() as turns:
            await turns.enter_async_context(self._service.commands.turn)
            for chunk in self._service.store.here:
                await turns.enter_async_context(self._service.executor.leases.turn(chunk))
            yield

    def restore(
        self, storage: Storage, folder: str, *, state: bool = True, version: int | None = None
    ) -> None:
        """Reads the shard's ranges and the versions of its chunks from a checkpoint. Raises what `load` raises.

        Args:
            storage: the run directory.
            folder: folder of the checkpoint.
            state: whether the rule's state, and a procedure's, are those of the checkpoint; else they begin anew.
            version: version of all chunks; None takes those of the checkpoint.
        """
        manifest = Manifest.decode(storage.read(f"{folder}/{STATE}"))
        versions = manifest.versions if version is None else [version] * len(manifest.versions)
        if self._place is not None:  # the chunks of parts are not those of the whole
            versions = [min(versions, default=0)] * self._service.store.chunks.num_chunks
        for chunk, held in self._service.state.chunks.items():
            held.version = versions[chunk]
        messages = [v1.Procedure.FromString(b64decode(text)) for text in manifest.procedures if state]
        for chunk, procedure in ChunkProcedure.restored(messages).items():
            if chunk in self._service.state.chunks:
                self._service.state.chunks[chunk].procedure = procedure
        if self._service.store.changed is not None:
            self._service.store.changed.restored(dict(enumerate(versions)))
        pieces = self.pieces()
        load(storage, folder, pieces if state else {"": pieces[""]})
