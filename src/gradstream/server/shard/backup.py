"""The backup of a shard in the memory of another: shard k + 1 keeps that of shard k, and the first that of the last.

`BackupOnPeer` is the side of the shard that is backed up, and `BackupHolder` that of the shard which keeps the backup.
When the process of a shard dies, a new one reads the backup from its holder. When that of the holder dies, the shard
continues without a backup, and makes it anew in the new process (`ChunkCopies.keep_all`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import torch

from gradstream.errors import PeerLostError, RefusedError
from gradstream.memory import Memory, Span, Vector
from gradstream.runtime.base import Runtime, Work
from gradstream.server.shard.copies import SUMS, Destination, OtherShard
from gradstream.transport.base import Stream
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap
from gradstream.wire.frames import to_wire

RELEASE_S = 2.0
"""How long the holder may take to release elements that it has copied, in seconds."""


class BackupOnPeer:
    """Sends backups to the shard that keeps them; see `BackupPlace`.

    No backup is made while the coordinator's newest notice names no holder. A holder that is a member and cannot be
    reached is tried again.

    Args:
        holder: the shard that keeps the backups.
    """

    def __init__(self, holder: OtherShard) -> None:
        self._holder = holder
        self._incarnation: int | None = None  # of the holder's process; None while there is none

    def follow(self, members: Mapping[str, int]) -> int | None:
        """See `BackupPlace`."""
        before, self._incarnation = self._incarnation, members.get(self._holder.name)
        return None if self._incarnation == before else self._incarnation

    async def put(self, backup: v1.Backup, spans: Sequence[Span] = ()) -> None:
        """See `BackupPlace`. Returns also if there is no holder: then there is no backup.

        Raises:
            What `OtherShard.retrying` raises.
        """

        async def attempt() -> None:
            if self._incarnation is not None:
                await self._put(backup, spans)

        await self._holder.retrying(attempt)

    async def _put(self, backup: v1.Backup, spans: Sequence[Span]) -> None:
        holder, lent = self._holder, []
        stream = await holder.endpoint.open(holder.name, "backup", backup)
        try:
            for span in spans:
                header = v1.Chunk(index=backup.chunk.index, elems=len(span), dtype=to_wire(span.tensor.dtype))
                lent.append(await stream.lend(v1.Frame(chunk=header), span, holder.silence_s))
            await stream.end()
            if await stream.recv(holder.silence_s) is None:
                raise PeerLostError(holder.name, "ended a backup without an answer")
        finally:
            stream.cancel("done")
            for one in lent:
                await one.back(RELEASE_S)

    async def clear(self) -> None:
        """See `BackupPlace`. The holder's process has begun with this one, and has nothing."""

    async def load(self, destination: Destination) -> None:
        """See `BackupPlace`. Raises what `OtherShard.load` raises."""
        await self._holder.load("backups", v1.Body(), destination)


class BackupHolder:
    """Keeps the backup of another shard in this one's memory. Serves "backup" and "backups".

    A process of the other shard that reads the backup is the only one that may change it from then on.

    Args:
        runtime: runtime of this shard's node.
        chunks: the chunk map, which alone determines sizes.
        owner: name of the shard whose backup this is.
        index: its number in the chunk map.
        dtype: element type of all vectors.
        states: names of the state vectors of the update rule.
    """

    def __init__(
        self,
        runtime: Runtime,
        chunks: ChunkMap,
        owner: str,
        index: int,
        dtype: torch.dtype,
        states: Sequence[str],
    ) -> None:
        self._runtime = runtime
        self._memory: Memory = runtime.memory
        self._chunks = chunks
        self._owner = owner
        self._elems = chunks.shard_elems(index)
        self._here = chunks.chunks_of(index)
        self._dtype = dtype
        self._names = {"", SUMS, *states}
        self._vectors: dict[str, Vector] = {}
        self._kept: dict[int, v1.Backup] = {}  # by chunk
        self._clocks = v1.Backup()
        self._incarnation: int | None = None  # of the process that may change it
        self._past: set[int] = set()  # of those that may no more
        self._turn = asyncio.Lock()

    async def serve_backup(self, stream: Stream) -> None:
        """Takes a backup, whole or not at all."""
        backup = v1.Backup.FromString(stream.opened.body)
        self._check_owner(stream)
        chunk = backup.chunk
        if backup.HasField("chunk"):
            if chunk.index not in self._here or not self._names.issuperset(chunk.vectors):
                raise self._bad(
                    f"chunk {chunk.index} with vectors {list(chunk.vectors)[:8]}; expected chunks of "
                    f"{self._owner} with vectors of {sorted(self._names)}"
                )
            spans = [self._span(name, chunk.index) for name in chunk.vectors]
        else:
            spans = []
        parts = []
        for span in spans:
            received = await stream.recv()
            part = None if received is None else received.payload
            if part is None or part.shape != span.tensor.shape or part.dtype != self._dtype:
                got = "nothing" if part is None else f"{tuple(part.shape)} of {part.dtype}"
                raise self._bad(
                    f"chunk {chunk.index}: got {got}, expected {tuple(span.tensor.shape)} of {self._dtype}"
                )
            parts.append(part)
        async with self._turn:
            self._check_owner(stream)
            self._incarnation = stream.opened.incarnation
            before = self._kept.get(chunk.index) if spans else self._clocks
            if before is not None and backup.number <= before.number:
                pass  # a copy that comes late
            elif spans:
                await self._copy(spans, parts)
                self._kept[chunk.index] = backup
            else:
                self._clocks = backup
        del parts  # a payload in shared memory returns to its owner
        await stream.send(v1.Frame(body=v1.Body()))

    async def serve_backups(self, stream: Stream) -> None:
        """Sends all backups to a new process of their shard. Nothing that an earlier one still sends is taken."""
        async with self._turn:
            self._check_caller(stream)
            if self._incarnation is not None and self._incarnation != stream.opened.incarnation:
                self._past.add(self._incarnation)
            self._incarnation = stream.opened.incarnation
        for backup in (*self._kept.values(), self._clocks):
            body = v1.Body(data=backup.SerializeToString())
            await stream.send(v1.Frame(body=body))
            for name in backup.chunk.vectors:
                span = self._span(name, backup.chunk.index)
                header = v1.Chunk(index=backup.chunk.index, elems=len(span), dtype=to_wire(self._dtype))
                await stream.send(v1.Frame(chunk=header), span)

    async def _copy(self, spans: Sequence[Span], parts: Sequence[torch.Tensor]) -> None:
        def copy(_: object) -> None:
            for span, part in zip(spans, parts, strict=True):
                span.tensor.copy_(part)

        elems = sum(map(len, spans))
        await self._runtime.compute(
            copy, work=Work("copy", elems=elems, brief=elems <= 1 << 16), writes=spans
        )

    def _span(self, name: str, chunk: int) -> Span:
        if name not in self._vectors:
            self._vectors[name] = self._memory.allocate(
                self._elems, self._dtype, f"backup of {name or 'parameters'}"
            )
        start, stop = self._chunks.local_bounds(chunk)
        return self._vectors[name][start:stop]

    def _check_caller(self, stream: Stream) -> None:
        if stream.opened.sender != self._owner:
            raise self._bad(f"{stream.opened.sender} is not {self._owner}, whose backup is here")
        if stream.opened.incarnation in self._past:
            raise self._taken_over()

    def _check_owner(self, stream: Stream) -> None:
        self._check_caller(stream)
        if self._incarnation not in (None, stream.opened.incarnation):
            raise self._taken_over()

    def _taken_over(self) -> RefusedError:
        text = f"another process of {self._owner} has taken its backup over"
        return RefusedError(self._runtime.node, "NOT_MEMBER", text)

    def _bad(self, message: str) -> RefusedError:
        return RefusedError(self._runtime.node, "BAD_REQUEST", f"a backup: {message}")
