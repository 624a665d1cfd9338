"""A worker's exchange through memory that all workers share.

The shared memory outlives any worker. A worker that dies leaves at most one sample half applied, and perhaps locks,
which the workers that need them free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from gradstream.checkpoint.manifest import STATE, Manifest
from gradstream.checkpoint.snapshot import Pieces, load
from gradstream.collectives.factory import SharedWindow, open_shared_window
from gradstream.collectives.group import GroupMembers
from gradstream.coordinator.client.member import Member, names_of
from gradstream.errors import DeadlineError
from gradstream.model.base import Layout
from gradstream.runtime.base import Runtime, Work
from gradstream.runtime.real import RealRuntime
from gradstream.sparse.data import SparseDataset
from gradstream.strategies.base import SharedMemoryStrategy
from gradstream.telemetry.events import Event, ExchangeEvent
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap
from gradstream.worker.assembly import Assembly
from gradstream.worker.exchange import Exchange, ExchangeContext
from gradstream.worker.shared.replica import SharedReplica, SharedWords

LOOK_S = 1e-3
"""Seconds between two reads of a word that another worker will write."""

_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


async def make(assembly: Assembly) -> SharedExchange:
    """Makes a worker's exchange, together with all other workers: they map the memory that they share.

    Raises:
        ConfigError: the workers are not on one machine.
        PeerLostError, DeadlineError: a worker was lost before all had mapped the memory.
    """
    context, parts, strategy = assembly.context, assembly.replica_context(), assembly.config.plan.strategy
    assert isinstance(strategy, SharedMemoryStrategy)
    config = context.config
    model, data = config.model, config.plan.job.data
    runtime, member = context.runtime, context.member
    real = isinstance(runtime, RealRuntime)  # the nodes of a simulation compute by turns, on one data set
    names, epoch = names_of(member.notice.nodes, "worker"), member.notice.epoch
    members = GroupMembers(names, config.rank, epoch, config.plan.job.deadlines.silence_s)
    window = await open_shared_window(runtime, context.endpoint, members, on_event=member.emit)
    try:
        layout = model.layout
        parameters = await window.common(layout.elems, layout.dtype, "parameters")
        words = await SharedWords.of(window, config.rank, parts.num_workers, layout.elems)
        sparse = await _SharedData.of(window, data) if real and isinstance(data, SparseDataset) else None
    except BaseException:
        await window.close()
        raise
    waits = Waits(runtime, member, words, config.plan.job.deadlines.silence_s)
    replica = SharedReplica(parts, parameters, words, waits.unlock, alone=not real)
    snapshot_source = _SharedSnapshot(replica, member, layout, config.chunk_elems)
    return SharedExchange(context, strategy, window, replica, snapshot_source, sparse)


@dataclass(frozen=True, slots=True)
class _SharedData:
    """Sparse data, and the shared memory for them."""

    data: SparseDataset
    tables: Mapping[str, np.ndarray[Any, Any]]

    @classmethod
    async def of(cls, window: SharedWindow, data: SparseDataset) -> _SharedData:
        tables = {
            name: (await window.common(elems, _TORCH[dtype], name)).tensor.numpy()
            for name, elems, dtype in data.shared()
        }
        return cls(data, tables)


class SharedExchange(Exchange):
    """Implements `Exchange`.

    Args:
        context: the worker's place in the run.
        strategy: strategy of the run.
        window: the shared memory.
        replica: this worker.
        snapshot_source: this worker's part of a checkpoint.
        sparse: sparse data that the workers share; None if each worker has its own data.
    """

    replica: SharedReplica

    def __init__(
        self,
        context: ExchangeContext,
        strategy: SharedMemoryStrategy,
        window: SharedWindow,
        replica: SharedReplica,
        snapshot_source: _SharedSnapshot,
        sparse: _SharedData | None,
    ) -> None:
        super().__init__(context)
        self.replica = replica
        self._strategy = strategy
        self._window = window
        self._snapshot_source = snapshot_source
        self._sparse = sparse

    async def begin(self) -> None:
        """See `Exchange`: the worker of the lowest rank fills the shared memory; if it dies, the next does."""
        context, words, runtime, sparse = (
            self._context,
            self.replica.words,
            self._context.runtime,
            self._sparse,
        )
        while not words.ready:
            if context.is_lowest():
                if sparse is not None:
                    await runtime.compute(lambda _: sparse.data.fill(sparse.tables), work=Work("init"))
                words.begin(await self._fill_parameters())
            else:
                await runtime.sleep(LOOK_S)
        if sparse is not None:
            sparse.data.map(sparse.tables)
        self.replica.version = words.version
        self._keep_snapshots(self._snapshot_source)

    async def _fill_parameters(self) -> int:
        """Makes or restores the initial parameters; returns on how many minibatches they were trained."""
        context, parameters = self._context, self.replica.parameters
        if context.resume is None:
            await context.init(parameters)
            return 0
        folder, storage = context.resume.folder, context.runtime.storage
        pieces: Mapping[str, Pieces] = {"": [(0, parameters.tensor)]}
        work = Work("restore", elems=len(parameters))
        await context.runtime.beside(lambda: load(storage, folder, pieces), work=work)
        return min(Manifest.decode(storage.read(f"{folder}/{STATE}")).versions, default=0)

    @override
    async def train(self) -> None:
        await self._strategy.train(self.replica)

    def report(self) -> Sequence[Event]:
        """See `Exchange`: a minibatch counts as a push and a fetch, without bytes."""
        staleness = self.replica.take_staleness()
        num = sum(staleness.values())
        event = ExchangeEvent(
            rank=self._context.config.rank,
            pushed_bytes=0,
            fetched_bytes=0,
            pushes=num,
            fetches=num,
            retries=0,
            staleness=staleness,
        )
        return [event] if num else []

    async def close(self) -> None:
        """See `Exchange`. The shared memory stays for as long as any worker maps it."""
        await super().close()
        await self._window.close()


class Waits:
    """Waits for locks that a worker cannot take.

    Args:
        runtime: runtime of the worker's node.
        member: tells which workers there are.
        words: has the locks.
        silence_s: longest time for which another worker may hold a lock.
    """

    def __init__(self, runtime: Runtime, member: Member, words: SharedWords, silence_s: float) -> None:
        self._runtime = runtime
        self._member = member
        self._words = words
        self._silence_s = silence_s
        self._met = (-1, -1, -1)  # halt, lock, and rank of its owner
        self._since_ns = 0

    async def unlock(self, lock: int, halt: int) -> None:
        """Frees a lock that a dead worker holds; else waits a moment for its owner.

        Args:
            lock: number of the lock.
            halt: number of this worker's halt. Time waited at an earlier halt does not count: the owner has
                released the lock in between.

        Raises:
            DeadlineError: a worker, which is named, has held the lock for `silence_s`.
        """
        owner = self._words.owner(lock)
        if owner < 0:
            return
        if owner not in {node.rank for node in self._member.notice.nodes if node.role == "worker"}:
            self._words.free(lock, owner)
            return
        if self._met != (halt, lock, owner):
            self._met, self._since_ns = (halt, lock, owner), self._runtime.now()
        elif self._runtime.left_s(self._since_ns, self._silence_s) < 0:
            raise DeadlineError(
                f"worker-{owner}",
                f"has kept lock {lock} of the common vector for {self._silence_s:g} s; is it stopped?",
            )
        await self._runtime.sleep(LOOK_S)


class _SharedSnapshot:
    """Implements `checkpoint.snapshot.SnapshotSource`: the present workers divide the writing of the vector.

    All workers are paused meanwhile, so all parts are of the same moment.

    Args:
        replica: this worker.
        member: tells which workers there are.
        layout: layout of the vector.
        chunk_elems: number of elements of a chunk; each worker writes some chunks.
    """

    def __init__(self, replica: SharedReplica, member: Member, layout: Layout, chunk_elems: int) -> None:
        self._replica = replica
        self._member = member
        self._elems = layout.elems
        self._chunk_elems = chunk_elems

    def _owned(self) -> tuple[ChunkMap, range]:
        names = names_of(self._member.notice.nodes, "worker")
        chunks = ChunkMap(self._elems, self._chunk_elems, len(names))
        return chunks, chunks.chunks_of(names.index(f"worker-{self._replica.rank}"))

    def pieces(self, holders: Sequence[str]) -> Mapping[str, Pieces]:
        """See `SnapshotSource`."""
        (chunks, own), vector = self._owned(), self._replica.parameters.tensor
        bounds = [chunks.bounds(chunk) for chunk in own]
        return {"": [(start, vector[start:stop]) for start, stop in bounds]}

    def versions(self, holders: Sequence[str]) -> Sequence[int]:
        """See `SnapshotSource`: the number of minibatches in the model."""
        return [self._replica.words.version] * len(self._owned()[1])

    def procedures(self, holders: Sequence[str]) -> Sequence[v1.Procedure]:
        """See `SnapshotSource`: there are no servers that could have one."""
        return ()

    def still(self) -> AbstractAsyncContextManager[object]:
        """See `SnapshotSource`: all workers stand still."""
        return nullcontext()
