"""The file of a shard's backups: torn ends, what an earlier part of a run has left, and its size."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
import torch

from gradstream.errors import DataError, DiskError
from gradstream.memory import Vector
from gradstream.runtime.base import Buffer
from gradstream.runtime.simulation import SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.runtime.virtual import VirtualCluster
from gradstream.server.shard.backup import BackupLog
from gradstream.wire import v1
from kit.faults import FailingStorage

PATH = "backups/shard-0.log"
ELEMS = 64


def on(storage: MemoryStorage, work: Callable[[BackupLog], Coroutine[Any, Any, Any]]) -> Any:
    """Runs `work` with a new process's log on a disk."""
    cluster = VirtualCluster(0, SimulationConfig(), storage)

    async def main() -> Any:
        return await work(BackupLog(cluster.runtime("shard-0"), 5.0))

    return cluster.run(main())


def put(*values: tuple[int, float]) -> Callable[[BackupLog], Coroutine[Any, Any, None]]:
    """Backs up chunks, given by number, with this element everywhere; the version is the same number."""

    async def work(log: BackupLog) -> None:
        for chunk, value in values:
            backup = v1.ChunkBackup(index=chunk, version=int(value), vectors=[""])
            await log.put(v1.Backup(chunk=backup), [Vector("w", torch.full((ELEMS,), value)).all])

    return work


async def read(log: BackupLog) -> dict[int, tuple[int, float]]:
    """Version and element of each chunk in the file."""
    found: dict[int, tuple[int, torch.Tensor]] = {}

    def destination(backup: v1.Backup) -> list[torch.Tensor]:
        found[backup.chunk.index] = backup.chunk.version, torch.zeros(ELEMS)
        return [found[backup.chunk.index][1]]

    await log.load(destination)
    return {chunk: (version, float(tensor[0])) for chunk, (version, tensor) in found.items()}


def test_the_newest_whole_record_of_a_chunk_counts() -> None:
    storage = MemoryStorage()
    on(storage, put((0, 1.0), (1, 1.0), (0, 2.0)))
    whole = storage.files[PATH]
    assert on(storage, read) == {0: (2, 2.0), 1: (1, 1.0)}
    for size in range(
        len(whole) - 260, len(whole), 7
    ):  # killed, or without power, while it wrote the last one
        storage.files[PATH] = whole[:size]
        assert on(storage, read) == {0: (1, 1.0), 1: (1, 1.0)}
    altered = bytearray(whole)
    altered[-1] ^= 1
    storage.files[PATH] = bytes(altered)
    assert on(storage, read) == {0: (1, 1.0), 1: (1, 1.0)}


def test_what_follows_a_torn_record_never_counts() -> None:
    """Two records were on their way when the power failed, and only the second one is on the disk."""
    storage = MemoryStorage()
    on(storage, put((0, 1.0)))
    first = len(storage.files[PATH])
    on(storage, put((0, 1.0), (0, 2.0), (1, 9.0)))
    torn = bytearray(storage.files[PATH])
    torn[first + 40] ^= 1
    storage.files[PATH] = bytes(torn)

    async def go_on(log: BackupLog) -> None:
        assert await read(log) == {0: (1, 1.0)}
        await put((0, 3.0))(log)  # as long as the torn record

    on(storage, go_on)
    assert on(storage, read) == {0: (3, 3.0)}


def test_a_run_that_begins_anew_finds_nothing_of_the_one_before() -> None:
    storage = MemoryStorage()
    on(storage, put((0, 5.0), (1, 5.0)))

    async def begin(log: BackupLog) -> None:
        await log.clear()
        await put((0, 1.0))(log)

    on(storage, begin)
    assert on(storage, read) == {0: (1, 1.0)}


def test_the_file_stays_short() -> None:
    storage = MemoryStorage()
    on(storage, put((0, 1.0), (1, 1.0)))
    two = len(storage.files[PATH])
    on(storage, put(*((step % 2, float(step)) for step in range(1, 60))))
    assert len(storage.files[PATH]) <= 3.5 * two
    assert on(storage, read) == {0: (58, 58.0), 1: (59, 59.0)}


def test_a_full_disk_is_waited_for_where_the_log_has_a_torn_end() -> None:
    """Without its end the log is written anew, for which there is no room at first."""
    storage = FailingStorage()
    on(storage, put((0, 1.0), (1, 1.0), (0, 2.0)))
    storage.files[PATH] = storage.files[PATH][:-1]
    storage.error = errno.ENOSPC

    async def read_meanwhile(log: BackupLog) -> Any:
        reading = asyncio.ensure_future(read(log))
        for _ in range(100):
            await asyncio.sleep(0)
        assert storage.num_failed > 0
        storage.error = 0
        return await reading

    assert on(storage, read_meanwhile) == {0: (1, 1.0), 1: (1, 1.0)}
    storage.files[PATH] = storage.files[PATH][:-1]
    storage.error = errno.ENOSPC
    with pytest.raises(DiskError, match="No space left"):
        on(storage, read)


def test_a_disk_without_room_for_a_second_file_keeps_what_it_is_given() -> None:
    storage = NoSecondFile()
    on(storage, put(*((step % 2, float(step)) for step in range(1, 60))))
    assert storage.num_refused > 0
    assert on(storage, read) == {0: (58, 58.0), 1: (59, 59.0)}


class NoSecondFile(MemoryStorage):
    """A disk with room for the log alone."""

    num_refused = 0

    def patch(self, path: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
        if path != PATH:
            self.num_refused += 1
            raise OSError(errno.ENOSPC, "No space left on device", path)
        super().patch(path, pieces)


def test_a_record_of_another_model_is_refused() -> None:
    storage = MemoryStorage()
    on(storage, put((0, 1.0)))

    async def other(log: BackupLog) -> None:
        await log.load(lambda backup: [torch.zeros(ELEMS + 1)])

    with pytest.raises(DataError, match="belongs to another model"):
        on(storage, other)
