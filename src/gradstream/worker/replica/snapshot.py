"""What a worker has of the run's vectors where there are no servers, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from gradstream.checkpoint.manifest import STATE, Manifest
from gradstream.checkpoint.snapshot import Pieces, load
from gradstream.runtime.base import Storage
from gradstream.wire.chunks import ChunkMap
from gradstream.worker.replica.group import GroupReplica

__all__ = ["ReplicaSnapshot"]


class ReplicaSnapshot:
    """Implements `checkpoint.snapshot.SnapshotSource`: a piece is this worker's slice of a bucket.

    All workers stand after the same round then, with the same parameters; so they divide the writing.

    Args:
        replica: of this worker.
        chunks: tells for which chunks' versions this worker answers.
    """

    def __init__(self, replica: GroupReplica, chunks: ChunkMap) -> None:
        self._replica = replica
        self._chunks = chunks

    def pieces(self) -> Mapping[str, Pieces]:
        """See `SnapshotSource`."""
        parameters, updater = self._replica.parameters.tensor, self._replica.group.updater
        owned = self._replica.group.owned
        out: dict[str, Pieces] = {"": [(start, parameters[start:stop]) for start, stop in owned]}
        for name, vector in updater.state.items():
            out[name] = [(start, updater.state_of(vector, start, stop).tensor) for start, stop in owned]
        return out

    def versions(self) -> Sequence[int]:
        """See `SnapshotSource`: the number of rounds in the model."""
        return [self._replica.version] * len(self._chunks.chunks_of(self._replica.rank))

    def still(self) -> AbstractAsyncContextManager[object]:
        """See `SnapshotSource`: nobody but this worker writes them, and it stands."""
        return nullcontext()

    def restore(self, storage: Storage, folder: str) -> None:
        """What this worker updates, and its state, of a checkpoint. Raises as `load`."""
        updater, parameters = self._replica.group.updater, self._replica.parameters.tensor
        pieces: dict[str, Pieces] = {"": [(start, parameters[start:stop]) for start, stop in updater.ranges]}
        for name, vector in updater.state.items():
            pieces[name] = [
                (start, updater.state_of(vector, start, stop).tensor) for start, stop in updater.ranges
            ]
        load(storage, folder, pieces)
        versions = Manifest.decode(storage.read(f"{folder}/{STATE}")).versions
        self._replica.version = min(versions, default=0)
