"""The backup of a shard: in the memory of another shard (below), or in a file of the run directory (`BackupLog`).

Shard k + 1 keeps that of shard k, and the first that of the last.

`BackupOnPeer` is the side of the shard that is backed up, and `BackupHolder` that of the shard which keeps the backup.
When the process of a shard dies, a new one reads the backup from its holder. When that of the holder dies, the shard
continues without a backup, and makes it anew in the new process (`ChunkCopies.keep_all`).
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError

from gradstream.errors import DataError, DiskError, PeerLostError, RefusedError
from gradstream.memory import Memory, Span, Vector
from gradstream.runtime.base import Buffer, Runtime, Work
from gradstream.runtime.storage import disk_error, disk_remedy
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


# ---- backup log --------------------------------------------------------------------------
# `BackupLog`: the backup of a shard in a file of the run directory, to which each backup is added at the end.
#
#     record: length of the description and of the elements (2 × 8 bytes), CRC-32 of all that follows (4 bytes),
#             description (`v1.Backup`), elements of its vectors
#
# The newest record of a chunk counts. A record that was written in part, when the process was killed or the machine
# lost power, is the last one and fails its checksum; nobody has seen what it held. Backups that come while the disk
# is busy are written together, with one fsync. When the file is three times as long as the records that count, these
# are written into a new file, which takes its place.

FOLDER = "backups"
"""Folder of the logs in the run directory."""

HEADER = struct.Struct("<QQI")
CLOCKS = -1
"""In place of the number of a chunk: the clocks of the workers."""

MOST_WASTE = 3
"""The file is written anew when it is this many times as long as the records that count."""

RETRY_S = 0.5
"""Seconds between two tries to write while the disk is full."""


@dataclass(slots=True)
class _Waiting:
    """A backup that waits for the disk."""

    chunk: int
    pieces: list[Buffer]
    elems: int
    done: asyncio.Future[None]


@dataclass(slots=True)
class _Index:
    """Where the records that count lie in the file.

    Args:
        records: offset and size of the newest record, by chunk.
        end_bytes: where the next record begins.
    """

    records: dict[int, tuple[int, int]] = field(default_factory=dict)
    end_bytes: int = 0

    def add(self, chunk: int, size_bytes: int) -> int:
        """Adds a record at the end; returns its offset."""
        offset, self.end_bytes = self.end_bytes, self.end_bytes + size_bytes
        self.records[chunk] = offset, size_bytes
        return offset

    @property
    def wasteful(self) -> bool:
        """Whether the file should be written anew."""
        return self.end_bytes > MOST_WASTE * sum(size for _, size in self.records.values())


class BackupLog:
    """A file of backups; see `BackupPlace`.

    Args:
        runtime: runtime of the shard's node; its storage has the file.
        patience_s: how long a full disk is waited for, in seconds.
    """

    def __init__(self, runtime: Runtime, patience_s: float) -> None:
        self._runtime = runtime
        self._patience_s = patience_s
        self._path = f"{FOLDER}/{runtime.node}.log"
        self._index = _Index()
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None

    async def put(self, backup: v1.Backup, spans: Sequence[Span] = ()) -> None:
        """See `BackupPlace`. It is in the file, and on the disk, when this returns.

        Raises:
            DiskError: the disk takes nothing for longer than `patience_s`.
        """
        elements = [span.tensor for span in spans]
        waiting = _Waiting(
            backup.chunk.index if backup.HasField("chunk") else CLOCKS,
            [
                backup.SerializeToString(),
                *([] if self._runtime.memory.shape_only else map(_bytes_of, elements)),
            ],
            sum(map(len, elements)),
            asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(waiting)
        if self._writing is None:
            self._writing = self._runtime.spawn(self._write(), name=f"{self._runtime.node}-backups")
        await waiting.done

    def follow(self, members: Mapping[str, int]) -> None:
        """See `BackupPlace`: no process keeps the file."""

    async def _write(self) -> None:
        """Writes what waits, until nothing does."""
        since_ns = self._runtime.now()
        while batch := self._waiting:
            self._waiting = []
            work = Work("write", elems=sum(one.elems for one in batch))
            try:
                await self._runtime.beside(lambda batch=batch: self._append(batch), work=work)  # type: ignore[misc]
            except OSError as error:
                self._waiting = batch + self._waiting
                try:
                    self._give_up_after(since_ns, error)
                except DiskError as gave_up:
                    self._fail(gave_up)
                    break
                await self._runtime.sleep(RETRY_S)
                continue
            except Exception as error:
                self._waiting = batch + self._waiting
                self._fail(error)
                break
            since_ns = self._runtime.now()
            for one in batch:
                if not one.done.done():
                    one.done.set_result(None)
        self._writing = None

    def _fail(self, error: Exception) -> None:
        """Raises an error in all that wait."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done.done():
                one.done.set_exception(error)

    def _append(self, batch: Sequence[_Waiting]) -> None:
        """Adds records at the end of the file. Where that fails, the next try overwrites what there is of them."""
        storage, index = self._runtime.storage, _Index(dict(self._index.records), self._index.end_bytes)
        if not index.end_bytes:
            storage.mkdir(FOLDER)
        pieces: list[tuple[int, Buffer]] = []
        for one in batch:
            record = _record(one.pieces)
            offset = index.add(one.chunk, sum(map(len, record)))
            for part in record:
                pieces.append((offset, part))
                offset += len(part)
        storage.patch(self._path, pieces)
        self._index = index
        if index.wasteful:
            with suppress(OSError):  # the disk has no room for a second file; later, perhaps
                self._compact()

    def _compact(self) -> None:
        """Writes the records that count into a new file, which takes the place of the old one."""
        storage, new, index = self._runtime.storage, f"{self._path}.new", _Index()
        storage.remove(new)
        storage.patch(
            new,
            (
                (index.add(chunk, size_bytes), storage.read_at(self._path, offset, size_bytes))
                for chunk, (offset, size_bytes) in self._index.records.items()
            ),
        )
        storage.rename(new, self._path)
        storage.sync(FOLDER)
        self._index = index

    async def clear(self) -> None:
        """See `BackupPlace`."""
        await self._runtime.beside(lambda: self._runtime.storage.remove(self._path), work=Work("write"))

    async def load(self, destination: Destination) -> None:
        """See `BackupPlace`.

        Raises:
            DiskError: the file has a torn end, and the disk takes no new file for longer than `patience_s`.
        """
        since_ns = self._runtime.now()
        while True:
            try:
                await self._runtime.beside(lambda: self._load(destination), work=Work("restore"))
                return
            except OSError as error:
                self._give_up_after(since_ns, error)
            await self._runtime.sleep(RETRY_S)

    def _give_up_after(self, since_ns: int, error: OSError) -> None:
        """Raises DiskError if the disk has failed for `patience_s`."""
        if self._runtime.left_s(since_ns, self._patience_s) <= 0:
            raise DiskError(
                f"{self._path} cannot be written: {disk_error(error)}; {disk_remedy(error)}"
            ) from error

    def _load(self, destination: Destination) -> None:
        storage, newest, index = self._runtime.storage, dict[int, v1.Backup](), _Index()
        try:
            size_bytes = storage.size(self._path)
        except FileNotFoundError:
            return
        while index.end_bytes + HEADER.size <= size_bytes:
            header = storage.read_at(self._path, index.end_bytes, HEADER.size)
            about_bytes, elements_bytes, checksum = HEADER.unpack(header)
            record_bytes = HEADER.size + about_bytes + elements_bytes
            if index.end_bytes + record_bytes > size_bytes:
                break
            data = storage.read_at(self._path, index.end_bytes + HEADER.size, about_bytes + elements_bytes)
            if zlib.crc32(data) != checksum:
                break
            backup = self._parsed(data[:about_bytes])
            chunk = backup.chunk.index if backup.HasField("chunk") else CLOCKS
            index.add(chunk, record_bytes)
            newest[chunk] = backup
        self._index = index
        if index.end_bytes < size_bytes:  # nothing of a torn end may be taken for a record later
            self._compact()
        for chunk, backup in newest.items():
            offset, record_bytes = self._index.records[chunk]
            at = offset + HEADER.size + backup.ByteSize()
            self._fill(destination(backup), at, offset + record_bytes)

    def _parsed(self, about: bytes) -> v1.Backup:
        try:
            return v1.Backup.FromString(about)
        except DecodeError as error:
            raise DataError(f"{self._path} is no log of a shard's backups: {error}") from error

    def _fill(self, tensors: Sequence[torch.Tensor], at: int, end: int) -> None:
        """Reads elements from the file into memory."""
        if at + sum(one.nbytes for one in tensors) != end:
            raise DataError(
                f"{self._path}: a record has {end - at} bytes of elements, expected "
                f"{sum(one.nbytes for one in tensors)}: it belongs to another model"
            )
        for tensor in tensors:
            data = self._runtime.storage.read_at(self._path, at, tensor.nbytes)
            tensor.copy_(torch.frombuffer(bytearray(data), dtype=tensor.dtype))
            at += tensor.nbytes


def _record(pieces: Iterable[Buffer]) -> list[Buffer]:
    about, *elements = pieces
    checksum = zlib.crc32(about)
    for part in elements:
        checksum = zlib.crc32(part, checksum)
    return [HEADER.pack(len(about), sum(map(len, elements)), checksum), about, *elements]


def _bytes_of(elements: torch.Tensor) -> Buffer:
    view: np.ndarray[Any, Any] = elements.numpy()
    return view.view(np.uint8).data
