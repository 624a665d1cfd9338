"""Backups of a shard: a copy of each chunk where it outlives the shard's process.

    push ─▶ Apply ─▶ arithmetic ─▶ commit ─▶ backup ─▶ Acknowledge, Release

Nothing leaves a shard before its backup has it: the shard acknowledges a push, and sends what came of it, only once
a copy of the chunk (`copies.py`) is in the backup. So a new process of the shard goes on where the old one has let
anybody see it; workers send again what was not acknowledged, and the windows tell what was applied.

A backup follows the sum of pushes, not each push: it has the same size for any number of workers.

Sources: Li et al. 2014 (replication after aggregation); Bressoud and Schneider 1996 (output waits for the backup).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gradstream.memory import Span
from gradstream.server.shard.copies import ChunkCopies, Destination
from gradstream.server.shard.estates import PushEstates
from gradstream.server.shard.executor import ShardExecutor
from gradstream.wire import v1


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

    def follow(self, members: Mapping[str, int]) -> int | None:
        """Takes in the members of the run, by name their incarnation, as a notice says them.

        Returns:
            The incarnation of a process that keeps the backups from now on, and has none yet; None if there is none.
        """
        ...

    async def load(self, destination: Destination) -> None:
        """Reads the newest backup of every chunk into memory.

        Raises:
            DataError: what is there is not a backup of this shard.
        """
        ...


class ShardBackup(ChunkCopies):
    """Writes and restores the backup of a shard.

    Args:
        executor: has the chunks, and waits for `keep` after each update.
        estates: minibatches of recent pushes.
        place: keeps the backups.
    """

    def __init__(self, executor: ShardExecutor, estates: PushEstates, place: BackupPlace) -> None:
        super().__init__(executor, estates)
        self.place = place
        executor.keep = self.keep

    async def keep(self, chunk: int) -> None:
        """Backs up a chunk, which nobody updates meanwhile; one without parameters has nothing to keep."""
        if (copy := self.of_chunk(chunk)) is not None:
            await self._put(*copy)

    async def _put(self, backup: v1.Backup, spans: Sequence[Span] = ()) -> None:
        self._number += 1
        backup.number = self._number
        await self.place.put(backup, spans)

    async def keep_all(self) -> None:
        """Backs up every chunk that has parameters: a place that had nothing has all of the shard then."""
        for chunk in self._state.chunks:
            async with self._leases.turn(chunk):
                await self.keep(chunk)
        await self.keep_clocks()

    async def keep_clocks(self) -> None:
        """Backs up which workers take part."""
        await self._put(self.of_clocks())
