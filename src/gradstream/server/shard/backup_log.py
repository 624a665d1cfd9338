"""`BackupLog`: the backup of a shard in a file of the run directory, to which each backup is added at the end.

    record: length of the description and of the elements (2 × 8 bytes), CRC-32 of all that follows (4 bytes),
            description (`v1.Backup`), elements of its vectors

The newest record of a chunk counts. A record that was written in part, when the process was killed or the machine
lost power, is the last one and fails its checksum; nobody has seen what it held. Backups that come while the disk
is busy are written together, with one fsync. When the file is three times as long as the records that count, these
are written into a new file, which takes its place.
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

from gradstream.errors import DataError, DiskError
from gradstream.memory import Span
from gradstream.runtime.base import Buffer, Runtime, Work
from gradstream.runtime.event_log import disk_error, disk_remedy
from gradstream.server.shard.copies import Destination
from gradstream.wire import v1

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
