"""A worker's exchange through memory that all workers share: it sees to what they begin with, and rests.

Everything that is shared outlives any worker: who dies leaves a sample half applied at most, and its locks,
which are taken from it by who needs them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from gradstream.checkpoint.manifest import STATE, Manifest
from gradstream.checkpoint.snapshot import NodeSnapshots, Pieces, load
from gradstream.collectives.group import GroupMembers
from gradstream.collectives.shared_window import SharedWindow, open_shared_window
from gradstream.coordinator.client.member import Member, names_of
from gradstream.data.base import Dataset
from gradstream.errors import ConfigError, DeadlineError
from gradstream.model.base import Layout
from gradstream.runtime.base import Runtime, Work, awaited_later
from gradstream.runtime.real import RealRuntime
from gradstream.sparse.data import SparseDataset
from gradstream.sparse.model import SparseModel
from gradstream.strategies.base import SharedMemoryStrategy
from gradstream.telemetry.events import Event, ExchangeEvent
from gradstream.wire.chunks import ChunkMap
from gradstream.worker.config import WorkerConfig
from gradstream.worker.exchange.base import ExchangeContext
from gradstream.worker.replica.base import ReplicaContext
from gradstream.worker.replica.shared import SharedReplica
from gradstream.worker.shared_words import SharedWords

__all__ = ["SharedExchange", "Waits", "form_shared"]

LOOK_S = 1e-3
"""Between two looks at a word that another worker is to write."""

_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


async def form_shared(
    context: ExchangeContext, parts: ReplicaContext, strategy: SharedMemoryStrategy, config: WorkerConfig
) -> SharedExchange:
    """All workers come together, and map what they are to share.

    Args:
        context: where it lives.
        parts: of the replica.
        strategy: of the run.
        config: of this worker. Sparse data are put into shared memory, once for all.

    Raises:
        ConfigError: they are not on one machine, or gradients are to be clipped that nobody makes.
        PeerLostError, DeadlineError: a worker was lost before all had mapped it.
    """
    model, data = config.model, config.data
    if config.clip and isinstance(model, SparseModel):
        raise ConfigError(
            f"{config.clip} with a sparse model: each sample is an update, and is not clipped; leave it out"
        )
    runtime, member = context.runtime, context.member
    real = isinstance(runtime, RealRuntime)  # the nodes of a simulation compute by turns, on one data set
    names, epoch = names_of(member.notice.nodes, "worker"), member.notice.epoch
    members = GroupMembers(names, context.rank, epoch, context.deadlines.silence_s)
    window = await open_shared_window(runtime, context.endpoint, members, on_event=member.emit)
    try:
        layout = parts.layout
        parameters = await window.common(layout.elems, layout.dtype, "parameters")
        words = await SharedWords.of(window, context.rank, parts.num_workers, layout.elems)
        tables = await _tables(window, data) if real and isinstance(data, SparseDataset) else {}
    except BaseException:
        await window.close()
        raise
    waits = Waits(runtime, member, words, context.deadlines.silence_s)
    replica = SharedReplica(parts, model, parameters, words, waits.unlock, alone=not real)
    start = _Start(data, tables)
    return SharedExchange(context, strategy, window, replica, start, layout, config.chunk_elems)


async def _tables(window: SharedWindow, data: SparseDataset) -> dict[str, np.ndarray[Any, Any]]:
    """Room for the data, the same for all."""
    return {
        name: (await window.common(elems, _TORCH[dtype], name)).tensor.numpy()
        for name, elems, dtype in data.shared()
    }


class SharedExchange:
    """Implements `Exchange`.

    Args:
        context: where it lives.
        strategy: of the run.
        window: where what is shared has come from.
        replica: of this worker.
        start: fills the parameters and the data, or maps what another worker has filled.
        layout: of the parameters.
        chunk_elems: elements of a chunk, by which workers divide the writing of a checkpoint.
    """

    def __init__(
        self,
        context: ExchangeContext,
        strategy: SharedMemoryStrategy,
        window: SharedWindow,
        replica: SharedReplica,
        start: _Start,
        layout: Layout,
        chunk_elems: int,
    ) -> None:
        self.replica = replica
        self._context = context
        self._strategy = strategy
        self._window = window
        self._start = start
        self._snapshot_source = _SharedSnapshot(replica, context.member, layout, chunk_elems)
        self._snapshots_task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """The worker of the lowest rank fills what is shared, or reads it; if it dies, the next one does."""
        context, words, runtime = self._context, self.replica.words, self._context.runtime
        while not words.ready:
            if context.is_lowest():
                await self._start.fill_data(runtime)
                words.begin(await self._fill_parameters())
            else:
                await runtime.sleep(LOOK_S)
        self._start.map_data()
        self.replica.version = words.version
        snapshots = NodeSnapshots(runtime, context.member, self._snapshot_source)
        self._snapshots_task = awaited_later(runtime.spawn(snapshots.run(), name=f"{runtime.node}-cuts"))

    async def _fill_parameters(self) -> int:
        """Returns how many minibatches are in them."""
        context, parameters = self._context, self.replica.parameters
        if context.resume is None:
            await context.init(parameters)
            return 0
        folder, storage = context.resume.folder, context.runtime.storage
        pieces: Mapping[str, Pieces] = {"": [(0, parameters.tensor)]}
        work = Work("restore", elems=len(parameters))
        await context.runtime.beside(lambda: load(storage, folder, pieces), work=work)
        return min(Manifest.decode(storage.read(f"{folder}/{STATE}")).versions, default=0)

    async def train(self) -> None:
        """See `Exchange`."""
        await self._strategy.train(self.replica)

    async def flush(self) -> None:
        """See `Exchange`: an update is in the model when it is made."""

    async def finish(self) -> None:
        """See `Exchange`: there is one vector."""

    def report(self) -> Sequence[Event]:
        """See `Exchange`: a minibatch is a push and a fetch, of no bytes."""
        staleness = self.replica.take_staleness()
        num = sum(staleness.values())
        event = ExchangeEvent(
            rank=self._context.rank,
            pushed_bytes=0,
            fetched_bytes=0,
            pushes=num,
            fetches=num,
            retries=0,
            staleness=staleness,
        )
        return [event] if num else []

    async def close(self) -> None:
        """See `Exchange`. What is shared stays for as long as a worker holds it."""
        if self._snapshots_task is not None:
            self._snapshots_task.cancel()
        await self._window.close()


class _Start:
    """The data of a run, before anybody has read them.

    Args:
        data: of this worker.
        tables: room for sparse data in shared memory; empty where each worker keeps its own.
    """

    def __init__(self, data: Dataset, tables: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self._data = data
        self._tables = tables

    async def fill_data(self, runtime: Runtime) -> None:
        """Makes or reads them, in shared memory."""
        data, tables = self._data, self._tables
        if tables and isinstance(data, SparseDataset):
            await runtime.compute(lambda _: data.fill(tables), work=Work("init"))

    def map_data(self) -> None:
        """From now on they are read from there."""
        if self._tables and isinstance(self._data, SparseDataset):
            self._data.map(self._tables)


class Waits:
    """What a worker does that cannot have a lock.

    Args:
        runtime, member: of this worker's node.
        words: has the locks.
        silence_s: how long another worker may hold one lock.
    """

    def __init__(self, runtime: Runtime, member: Member, words: SharedWords, silence_s: float) -> None:
        self._runtime = runtime
        self._member = member
        self._words = words
        self._silence_s = silence_s
        self._met = (-1, -1, -1)  # the halt, the lock, and whose it is
        self._since_ns = 0

    async def unlock(self, lock: int, halt: int) -> None:
        """Takes it from a worker that is dead; else gives the one that holds it time.

        Args:
            lock: its number.
            halt: number of this worker's halt. The time that it waited at an earlier one does not count,
                though it was for the same lock of the same worker, which has given it back in between.

        Raises:
            DeadlineError: naming a worker that has held it for `silence_s`.
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
    """Implements `checkpoint.snapshot.SnapshotSource`: workers that are there divide the writing of the vector.

    All of them stand then, so what each copies is of one moment.

    Args:
        replica: of this worker.
        member: says who is there.
        layout, chunk_elems: what is divided, in chunks.
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

    def pieces(self) -> Mapping[str, Pieces]:
        """See `SnapshotSource`."""
        (chunks, own), vector = self._owned(), self._replica.parameters.tensor
        bounds = [chunks.bounds(chunk) for chunk in own]
        return {"": [(start, vector[start:stop]) for start, stop in bounds]}

    def versions(self) -> Sequence[int]:
        """See `SnapshotSource`: how many minibatches are in the model."""
        return [self._replica.words.version] * len(self._owned()[1])

    def still(self) -> AbstractAsyncContextManager[object]:
        """See `SnapshotSource`: all workers stand."""
        return nullcontext()
