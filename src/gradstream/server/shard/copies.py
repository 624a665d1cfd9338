"""`ChunkCopies`: all copies of a shard's chunks: for its backup, for shards that take its place, for a checkpoint.

A copy of a chunk is the elements of all its vectors, and what the state machine knows of it: version, sum, windows of
sequence numbers, clocks, and the minibatches of recent pushes. With it, another shard continues with the chunk as if it
had always had it.

    push ─▶ Apply ─▶ arithmetic ─▶ commit ─▶ backup ─▶ Acknowledge, Release

Nothing leaves a shard before its backup has it: the shard acknowledges a push, and sends what came of it, only once
a copy of the chunk is in the backup. So a new process of the shard continues where the old one has let anybody see it;
workers send again what was not acknowledged, and the windows tell what was applied. A backup follows the sum of pushes,
not each push: it has the same size for any number of workers. Where pushes are no rounds, those that come while a copy
is on its way share the next one.

    notice: holds ──▶ hold ──▶ updates in progress end ──▶ copies of chunks ──▶ the new shard
    notice: switched ──▶ leave              notice: failed ──▶ thaw, and all that has come meanwhile happens

A held shard keeps every event for later: it acknowledges nothing, and drops nothing. So a copy that it gives has
all that anybody knows of, and a push that comes meanwhile is either in nothing, or, after a thaw, in the parameters.

Sources: Li et al. 2014 (replication after aggregation); Bressoud and Schneider 1996 (output waits for the backup).
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

import torch
from google.protobuf.message import Message

from gradstream.checkpoint.manifest import STATE, Manifest
from gradstream.checkpoint.snapshot import Pieces, load, unsplit
from gradstream.errors import (
    ClosedError,
    DataError,
    DeadlineError,
    GradstreamError,
    PeerLostError,
    RefusedError,
)
from gradstream.memory import Span
from gradstream.runtime.base import Runtime, Storage
from gradstream.server.aggregation import rank_of
from gradstream.server.procedure import swap_accepted
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.executor import Commands, ShardExecutor
from gradstream.server.shard.passes import ChunkProcedure
from gradstream.server.shard.pushes import KeptPushes
from gradstream.server.shard.state import ChunkState
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1
from gradstream.wire.chunks import PartMap, Placement
from gradstream.wire.frames import SequenceWindow, to_wire

# ---- between processes -------------------------------------------------------------------

SUMS = "sums"
"""Name of the vector of sums in a copy."""

RETRY_S = 0.02
"""Seconds between two tries to reach another shard, until a notice says that it is lost."""

Destination = Callable[[v1.Backup], Sequence[torch.Tensor]]
"""Names the memory for the vectors of a copy that is about to be read. Raises DataError for an impossible one."""


class BackupPlace(Protocol):
    """Keeps backups of one shard: a file (`BackupLog`), or another shard (`BackupOnPeer`)."""

    async def put(self, backup: v1.Backup, spans: Sequence[Span] = ()) -> None:
        """Keeps a backup in place of the one before of the same chunk. Returns once it would survive this process.

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


class OtherShard:
    """Another shard that takes or gives copies, and is tried again where it cannot be reached.

    Args:
        runtime, endpoint: of this shard.
        name: name of the other shard.
        config: `silence_s`, for which the other one may say nothing, and `retry_s`, for which it is tried.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, name: str, config: ShardConfig) -> None:
        self.name = name
        self.endpoint = endpoint
        self.silence_s = config.silence_s
        self._runtime = runtime
        self._retry_s = config.retry_s

    async def retrying(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Tries until an attempt succeeds.

        Raises:
            RefusedError: the other shard cannot do it, or has not done it for `retry_s`.
            PeerLostError, DeadlineError: it could not be reached for `retry_s`.
        """
        since_ns = self._runtime.now()
        while True:
            try:
                return await attempt()
            except GradstreamError as error:
                if isinstance(error, DeadlineError):
                    self.endpoint.redial(self.name, self.silence_s)
                if not _may_pass(error) or self._runtime.left_s(since_ns, self._retry_s) <= 0:
                    raise
            await self._runtime.sleep(RETRY_S)

    async def load(self, method: str, request: Message, destination: Destination) -> None:
        """Reads copies of chunks into memory.

        Args:
            method: sends copies.
            request: its request.
            destination: names the memory for each copy.

        Raises:
            PeerLostError, DeadlineError: as `retrying`.
            RefusedError: the other shard has no such copies.
            DataError: they do not fit.
        """

        async def attempt() -> None:
            stream = await self.endpoint.open(self.name, method, request)
            try:
                while (received := await stream.recv(self.silence_s)) is not None:
                    backup = v1.Backup.FromString(received.frame.body.data)
                    for tensor in destination(backup):
                        await self._receive(stream, backup.chunk.index, tensor)
            finally:
                stream.cancel("done")

        await self.retrying(attempt)

    async def _receive(self, stream: Stream, chunk: int, into: torch.Tensor) -> None:
        part = await stream.recv(self.silence_s)
        if part is None or part.payload is None or part.payload.shape != into.shape:
            raise DataError(
                f"{self.name}: its copy of chunk {chunk} does not have the {into.numel()} elements "
                "that were expected; `gradstream resume` continues the run from its newest checkpoint"
            )
        into.copy_(part.payload)


def _may_pass(error: GradstreamError) -> bool:
    """Whether the next try may succeed: a connection is lost, or one side has not heard a notice yet."""
    if isinstance(error, RefusedError):
        return error.code in ("STALE_EPOCH", "NOT_MEMBER")
    return isinstance(error, PeerLostError | DeadlineError | ClosedError)


# ---- copies ------------------------------------------------------------------------------


class ChunkCopies:
    """Makes the copies of a shard's chunks, serves them, and restores chunks from others. A `SnapshotSource`.

    Args:
        runtime: runtime of the shard's node.
        config: the shard's part of the run.
        executor: has the chunks, and waits for `keep` after each update where there is a backup.
        commands: steps of a procedure, none of which is in progress in a handover or a snapshot.
        kept_pushes: minibatches of recent pushes.
        place: keeps the backups; None if pushes are acknowledged without.

    Attributes:
        part: which parameters of a split model the shard has; None if the model is not split.
        members: incarnation of each member of the run, by name.
        num_restored: number of chunks that were restored.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: ShardConfig,
        executor: ShardExecutor,
        commands: Commands,
        kept_pushes: KeptPushes,
        place: BackupPlace | None,
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._executor = executor
        self._state = executor.state
        self._store = executor.store
        self._leases = executor.leases
        self._commands = commands
        self._kept_pushes = kept_pushes
        self._number = 0  # of the last backup
        self._to: Placement | None = None  # whose shards get the chunks of this one
        self.place = place
        self.part: PartMap | None = None
        self.members: Mapping[str, int] = {}
        self.num_restored = 0
        if place is not None:
            executor.keep = self.keep

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
            self._store.changed.restored(
                {chunk.index: chunk.version for chunk in self._state.chunks.values()}
            )
        clocks = self._state.clocks
        for worker in workers:
            if members.get(f"worker-{worker.rank}") != worker.incarnation:
                continue
            if worker.entered:
                clocks.resume(worker.rank, worker.entered)
            if worker.paused:
                clocks.pause(worker.rank)

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
        for window in backup.windows:
            state.windows[window.sender, window.incarnation] = SequenceWindow.of(window.low, window.above)
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

    # ---- backup -------------------------------------------------------------------------

    async def keep(self, chunk: int) -> None:
        """Backs up a chunk, which nobody updates meanwhile; one without parameters has nothing to keep."""
        if (copy := self.of_chunk(chunk)) is not None:
            await self._put(*copy)

    async def keep_all(self) -> None:
        """Backs up every chunk that has parameters: a place that had nothing has all of the shard then."""
        for chunk in self._state.chunks:
            async with self._leases.turn(chunk):
                await self.keep(chunk)
        await self.keep_clocks()

    async def keep_clocks(self) -> None:
        """Backs up which workers take part."""
        await self._put(self.of_clocks())

    async def _put(self, backup: v1.Backup, spans: Sequence[Span] = ()) -> None:
        if self.place is not None:
            self._number += 1
            backup.number = self._number
            await self.place.put(backup, spans)

    # ---- handover -----------------------------------------------------------------------

    def hold(self, to: Placement) -> None:
        """Holds the shard until it has handed over to the shards of another placement."""
        self._to = to
        self._executor.hold()

    def thaw(self) -> None:
        """Lets the shard continue."""
        if self._to is not None:
            self._to = None
            self._executor.thaw()

    async def hand_over(self, stream: Stream) -> None:
        """Serves "handover": sends copies of the chunks that a new shard asks for.

        Raises:
            RefusedError: STALE_EPOCH where this shard does not hand over to the caller, as far as it knows; other codes
                where it cannot.
        """
        request = v1.Handover.FromString(stream.opened.body)
        self._check_taker(stream.opened, request)
        store, chunks = self._store, list(request.chunks)
        if not set(chunks) <= set(store.here) or len(set(chunks)) < len(chunks):
            text = f"{stream.peer} asks for chunks {chunks[:8]}...; expected some of {store.here}, each once"
            raise RefusedError(self._runtime.node, "BAD_REQUEST", text)
        await self._executor.still()
        async with self._commands.turn:
            pass  # a step of a procedure that was in progress is over, and no other begins
        described = False
        for chunk in chunks:
            self._check_taker(stream.opened, request)
            copy = self.of_chunk(chunk)
            if copy is None:
                continue
            backup, spans = copy
            if described:
                backup.chunk.ClearField("pushes")  # they are those of the shard, not of the chunk
            described = True
            await stream.send(v1.Frame(body=v1.Body(data=backup.SerializeToString())))
            for span in spans:
                await stream.credit(self._config.silence_s)
                async with self._leases.turn(chunk):
                    self._check_taker(stream.opened, request)
                    header = v1.Chunk(index=chunk, elems=len(span), dtype=to_wire(store.dtype))
                    await stream.send(v1.Frame(chunk=header), span)
        self._check_taker(stream.opened, request)
        data = self.of_clocks().SerializeToString()
        await stream.send(v1.Frame(body=v1.Body(data=data)))

    def _check_taker(self, opened: v1.Open, request: v1.Handover) -> None:
        """Refuses a shard to which this one does not hand over, or not any more."""
        to = self._to
        if to is None or to.first != request.first or opened.sender not in to.names:
            expected = "nobody" if to is None else ", ".join(to.names[:8])
            text = f"{opened.sender} asks for chunks; this shard hands over to {expected}"
            raise RefusedError(self._runtime.node, "STALE_EPOCH", text)

    async def take_over(self, endpoint: Endpoint, before: Placement, members: Mapping[str, int]) -> None:
        """Gets this shard's chunks from the shards that have them, from all at once, and has them backed up.

        Args:
            endpoint: endpoint of this shard.
            before: the shards that have the parameters.
            members: incarnation of each member of the run, by name.

        Raises:
            GradstreamError: a shard does not give them, or what it gives does not fit.
        """

        async def take(name: str, chunks: Iterable[int], destination: Destination) -> None:
            request = v1.Handover(first=self._config.first, chunks=chunks)
            await OtherShard(self._runtime, endpoint, name, self._config).load(
                "handover", request, destination
            )

        async def take_all(destination: Destination) -> None:
            parts = before.divided(self._store.here)
            await self._runtime.gather(*(take(name, chunks, destination) for name, chunks in parts.items()))

        await self.restore(take_all, members)
        if self.place is not None:
            await self.place.clear()
            await self.keep_all()

    # ---- checkpoint ---------------------------------------------------------------------

    def pieces(self, holders: Sequence[str] = ()) -> Mapping[str, Pieces]:
        """See `SnapshotSource`."""
        store, known = self._store, self._state.chunks
        pieces: dict[str, list[tuple[int, torch.Tensor]]] = {name: [] for name in ("", *store.state)}
        for chunk in store.here:
            vectors = {"": store.parameters, **store.state}
            if known[chunk].procedure.accepted:
                swap_accepted(vectors)
            for name, vector in vectors.items():
                pieces[name].append((store.chunks.bounds(chunk)[0], store.span(vector, chunk).tensor))
        if self.part is None:
            return pieces
        return {name: unsplit(those, self.part) for name, those in pieces.items()}

    def versions(self, holders: Sequence[str]) -> Sequence[int]:
        """See `SnapshotSource`."""
        return self._state.versions()

    def procedures(self, holders: Sequence[str]) -> Sequence[v1.Procedure]:
        """See `SnapshotSource`."""
        chunks = self._state.chunks
        return ChunkProcedure.messages({number: chunk.procedure for number, chunk in chunks.items()})

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """See `SnapshotSource`: the shard applies every acknowledged push first. A lost worker's last pushes wait."""
        await self._executor.flush()
        async with AsyncExitStack() as turns:
            await turns.enter_async_context(self._commands.turn)
            for chunk in self._store.here:
                await turns.enter_async_context(self._leases.turn(chunk))
            yield

    def load_checkpoint(
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
        if self.part is not None:  # the chunks of parts are not those of the whole
            versions = [min(versions, default=0)] * self._store.chunks.num_chunks
        for chunk, held in self._state.chunks.items():
            held.version = versions[chunk]
        messages = [v1.Procedure.FromString(b64decode(text)) for text in manifest.procedures if state]
        for chunk, procedure in ChunkProcedure.restored(messages).items():
            if chunk in self._state.chunks:
                self._state.chunks[chunk].procedure = procedure
        if self._store.changed is not None:
            self._store.changed.restored(dict(enumerate(versions)))
        pieces = self.pieces()
        load(storage, folder, pieces if state else {"": pieces[""]})


def _windows(state: ChunkState) -> list[v1.Window]:
    return [
        v1.Window(sender=name, incarnation=incarnation, low=window.low, above=window.above)
        for (name, incarnation), window in state.windows.items()
    ]
