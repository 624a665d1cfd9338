"""Backups of a shard: a copy of each chunk where it outlives the shard's process.

    push ─▶ Apply ─▶ arithmetic ─▶ commit ─▶ backup ─▶ Acknowledge, Release

Nothing leaves a shard before its backup has it: the shard acknowledges a push, and sends what came of it, only once
the chunk's new state is in the backup. That state is the elements of all vectors of the chunk and what the state
machine knows of it: version, sum, windows of sequence numbers, clocks. So a new process of the shard goes on where
the old one has let anybody see it; workers send again what was not acknowledged, and the windows tell what was applied.

A backup follows the sum of pushes, not each push: it has the same size for any number of workers.

Sources: Li et al. 2014 (replication after aggregation); Bressoud and Schneider 1996 (output waits for the backup).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from gradstream.errors import DataError
from gradstream.memory import Span
from gradstream.server.aggregation import rank_of
from gradstream.server.shard.estates import PushEstates
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.state import ChunkState
from gradstream.wire import v1
from gradstream.wire.window import SequenceWindow

__all__ = ["SUMS", "BackupPlace", "Destination", "ShardBackup"]

SUMS = "sums"
"""Name of the vector of sums in a backup."""

Destination = Callable[[v1.Backup], Sequence[torch.Tensor]]
"""Names the memory for the vectors of a backup that is about to be read. Raises DataError for an impossible one."""


class BackupPlace(Protocol):
    """Keeps backups of one shard: a file (`BackupLog`), or another shard (`BackupOnPeer`)."""

    async def put(self, backup: v1.Backup, spans: Sequence[Span] = ()) -> None:
        """Keeps a backup in the place of the one before of the same chunk. Returns once it would survive this process.

        Args:
            backup: the state of a chunk, or the clocks of the workers.
            spans: elements of its vectors, which nobody writes meanwhile.
        """
        ...

    async def clear(self) -> None:
        """Removes what an earlier part of the run has left: a resumed run begins with its checkpoint."""
        ...

    async def load(self, destination: Destination) -> None:
        """Reads the newest backup of every chunk into memory.

        Raises:
            DataError: what is there is not a backup of this shard.
        """
        ...


class ShardBackup:
    """Writes and restores the backup of a shard.

    Args:
        executor: has the chunks, and waits for `keep` after each update.
        estates: minibatches of recent pushes.
        place: keeps the backups.

    Attributes:
        members: incarnation of each member of the run, by name.
        num_restored: number of chunks that were in the backup.
    """

    def __init__(self, executor: ShardExecutor, estates: PushEstates, place: BackupPlace) -> None:
        self._state = executor.state
        self._store = executor.store
        self._leases = executor.leases
        self._estates = estates
        self._place = place
        self.members: Mapping[str, int] = {}
        self.num_restored = 0
        self._number = 0  # of the last backup
        executor.keep = self.keep

    async def keep(self, chunk: int) -> None:
        """Backs up a chunk, which nobody updates meanwhile; one without parameters has nothing to keep."""
        state = self._state.chunks[chunk]
        if state.version < 0:
            return
        vectors = ["", *self._store.state, *([SUMS] if state.summed else [])]
        backup = v1.ChunkBackup(
            index=chunk,
            version=state.version,
            summed=state.summed,
            clock=state.clock,
            lr=state.lr,
            windows=_windows(state),
            clocks=self._state.clocks.at(chunk),
            vectors=vectors,
            estates=self._estates.backup(),
        )
        await self._put(v1.Backup(chunk=backup), [self._span(name, chunk) for name in vectors])

    async def _put(self, backup: v1.Backup, spans: Sequence[Span] = ()) -> None:
        self._number += 1
        backup.number = self._number
        await self._place.put(backup, spans)

    async def keep_all(self) -> None:
        """Backs up every chunk that has parameters: a place that had nothing has all of the shard then."""
        for chunk in self._state.chunks:
            async with self._leases.turn(chunk):
                await self.keep(chunk)
        await self.keep_clocks()

    async def keep_clocks(self) -> None:
        """Backs up which workers take part."""
        clocks = self._state.clocks
        workers = [
            v1.WorkerClock(
                rank=rank_of(name),
                incarnation=incarnation,
                paused=rank_of(name) not in clocks.present,
                entered=clocks.entered.get(rank_of(name), 0),
            )
            for name, incarnation in self.members.items()
            if name.startswith("worker")
        ]
        await self._put(v1.Backup(workers=workers))

    async def begin(self) -> None:
        """Begins without a backup, where this process does not take the place of another one."""
        await self._place.clear()

    async def restore(self, members: Mapping[str, int]) -> None:
        """Goes on where an earlier process of this shard has ended. Chunks without a backup stay as they are.

        Args:
            members: incarnation of each member of the run, by name. The clocks of others are not restored.

        Raises:
            DataError: the backup does not fit this shard.
        """
        self.members = members
        workers: list[v1.WorkerClock] = []
        restored: set[int] = set()

        def destination(backup: v1.Backup) -> list[torch.Tensor]:
            self._number = max(self._number, backup.number)
            if not backup.HasField("chunk"):
                workers[:] = backup.workers
                return []
            restored.add(backup.chunk.index)
            return self._restored(backup.chunk)

        await self._place.load(destination)
        self.num_restored = len(restored)
        if self._store.changed is not None:
            self._store.changed.restored({one.index: one.version for one in self._state.chunks.values()})
        clocks = self._state.clocks
        for one in workers:
            if members.get(f"worker-{one.rank}") != one.incarnation:
                continue
            if one.entered:
                clocks.resume(one.rank, one.entered)
            if one.paused:
                clocks.pause(one.rank)

    def _restored(self, backup: v1.ChunkBackup) -> list[torch.Tensor]:
        """Restores what the state machine knows of a chunk. Returns the memory for the chunk's vectors."""
        state = self._state.chunks.get(backup.index)
        known = {"", SUMS, *self._store.state}
        if state is None or not {"", *self._store.state} <= set(backup.vectors) <= known:
            raise DataError(
                f"a backup of chunk {backup.index} with vectors {list(backup.vectors)[:8]}; expected chunks "
                f"{self._store.here} with {sorted(known)}: it belongs to another run"
            )
        state.version, state.summed = backup.version, backup.summed
        state.clock, state.lr = backup.clock, backup.lr
        for one in backup.windows:
            state.windows[one.sender, one.incarnation] = SequenceWindow.of(one.low, one.above)
        for rank, clock in backup.clocks.items():
            name = f"worker-{rank}"
            if (name, self.members.get(name)) in state.windows:
                self._state.clocks.advance(backup.index, rank, clock)
        self._estates.restore(backup.estates)
        return [self._span(name, backup.index).tensor for name in backup.vectors]

    def _span(self, name: str, chunk: int) -> Span:
        if name == SUMS:
            return self._store.sum_spans(chunk)[0]
        return self._store.span(self._store.vector(name), chunk)


def _windows(state: ChunkState) -> list[v1.Window]:
    return [
        v1.Window(sender=name, incarnation=incarnation, low=window.low, above=window.above)
        for (name, incarnation), window in state.windows.items()
    ]
