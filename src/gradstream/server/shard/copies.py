"""`ChunkCopies`: all that a shard knows of a chunk, as a message and elements, and back.

A copy is the elements of all vectors of the chunk, and what the state machine knows of it: version, sum, windows of
sequence numbers, clocks, and the minibatches of recent pushes. With it, another shard goes on with the chunk as if it
had always had it. Backups (`backup.py`) and new shards (`service.py`) get such copies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import torch

from gradstream.errors import DataError
from gradstream.memory import Span
from gradstream.server.aggregation import rank_of
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.kept_pushes import KeptPushes
from gradstream.server.shard.passes import ChunkProcedure
from gradstream.server.shard.state import ChunkState
from gradstream.wire import v1
from gradstream.wire.window import SequenceWindow

SUMS = "sums"
"""Name of the vector of sums in a copy."""

Destination = Callable[[v1.Backup], Sequence[torch.Tensor]]
"""Names the memory for the vectors of a copy that is about to be read. Raises DataError for an impossible one."""


class ChunkCopies:
    """Makes and restores the copies of a shard.

    Args:
        executor: has the chunks.
        kept_pushes: minibatches of recent pushes.

    Attributes:
        members: incarnation of each member of the run, by name.
        num_restored: number of chunks that were restored.
    """

    def __init__(self, executor: ShardExecutor, kept_pushes: KeptPushes) -> None:
        self._state = executor.state
        self._store = executor.store
        self._leases = executor.leases
        self._kept_pushes = kept_pushes
        self._number = 0  # of the last backup
        self.members: Mapping[str, int] = {}
        self.num_restored = 0

    def of_chunk(self, chunk: int) -> tuple[v1.Backup, list[Span]] | None:
        """A chunk, which nobody updates meanwhile, and its elements; None if it has no parameters yet."""
        state = self._state.chunks[chunk]
        if state.version < 0:
            return None
        vectors = ["", *self._store.state, *([SUMS] if state.summed else [])]
        copy = v1.ChunkBackup(
            index=chunk,
            version=state.version,
            summed=state.summed,
            clock=state.clock,
            lr=state.lr,
            windows=_windows(state),
            clocks=self._state.clocks.at(chunk),
            vectors=vectors,
            pushes=self._kept_pushes.backup(),
            procedure=state.procedure.message(chunk) if state.procedure.number else None,
        )
        return v1.Backup(chunk=copy), [self._span(name, chunk) for name in vectors]

    def of_clocks(self) -> v1.Backup:
        """Which workers take part."""
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
        return v1.Backup(workers=workers)

    async def restore(
        self, load: Callable[[Destination], Awaitable[None]], members: Mapping[str, int]
    ) -> None:
        """Goes on where other processes have ended. Chunks without a copy stay as they are.

        Args:
            load: reads the copies.
            members: incarnation of each member of the run, by name. The clocks of others are not restored.

        Raises:
            DataError: a copy does not fit this shard.
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

        await load(destination)
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
        self._store.headroom.forget(backup.index)
        state.version, state.summed = backup.version, backup.summed
        state.clock, state.lr = backup.clock, backup.lr
        for one in backup.windows:
            state.windows[one.sender, one.incarnation] = SequenceWindow.of(one.low, one.above)
        for rank, clock in backup.clocks.items():
            name = f"worker-{rank}"
            if (name, self.members.get(name)) in state.windows:
                self._state.clocks.advance(backup.index, rank, clock)
        self._kept_pushes.restore(backup.pushes)
        state.procedure = ChunkProcedure.of(backup.procedure)
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
