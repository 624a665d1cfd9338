"""A node's part in a snapshot: it holds its ranges as they are, and writes them into the checkpoint's files.

Held means copied, where there is memory for a copy, and written while workers wait, where there is
not. Nothing is being applied then: every worker stands, with all that it has computed in the model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

import torch

from gradstream.checkpoint.folder import data_offset, file_of
from gradstream.errors import DataError, GradstreamError
from gradstream.memory import trim
from gradstream.runtime.base import Runtime, Storage, Work
from gradstream.runtime.resources import free_memory_bytes
from gradstream.wire import v1

__all__ = ["NodeSnapshots", "Pieces", "SnapshotMember", "SnapshotSource", "load"]

ROOM = 1.5
"""A copy is made where this much of its size is free."""

READ_ELEMS = 1 << 20

Pieces = Sequence[tuple[int, torch.Tensor]]
"""What a node has of a vector: where in the whole of it each piece begins, and its elements."""


class SnapshotSource(Protocol):
    """Who has parts of the run's vectors: a shard, or a worker where there are no servers."""

    def pieces(self) -> Mapping[str, Pieces]:
        """Its pieces of each vector, as they are now: "" is the parameters, else a state of the optimizer."""
        ...

    def versions(self) -> Sequence[int]:
        """Of the chunks that it answers for."""
        ...

    def still(self) -> AbstractAsyncContextManager[object]:
        """Inside, nothing is written to any piece."""
        ...


class SnapshotMember(Protocol):
    """What is needed of `gradstream.coordinator.SnapshotMember`."""

    notice: v1.Notice

    async def heard(self, reached: Callable[[], bool]) -> None:
        """Waits until something holds that a notice decides."""
        ...

    def report(self, report: v1.SnapshotReport) -> None:
        """Says how far this node is with a snapshot."""
        ...


class NodeSnapshots:
    """Follows the snapshots of a run, one after the other.

    Args:
        runtime: of the node.
        member: tells of cuts.
        holder: has the pieces.
    """

    def __init__(self, runtime: Runtime, member: SnapshotMember, holder: SnapshotSource) -> None:
        self._runtime = runtime
        self._member = member
        self._holder = holder

    async def run(self) -> None:
        """Serves every snapshot that comes, until it is cancelled or the run is over."""
        snapshot = v1.Snapshot()
        while True:
            await self._member.heard(partial(self._asked, snapshot.number))
            snapshot = v1.Snapshot()
            snapshot.CopyFrom(self._member.notice.snapshot)
            try:
                await self._serve(snapshot)
            except Exception as error:
                if isinstance(error, GradstreamError) and not isinstance(error, DataError):
                    raise  # the run is over
                text = f"{type(error).__name__}: {error}"
                self._say(snapshot, v1.SnapshotReport.FAILED, error=text)

    def _asked(self, number: int) -> bool:
        snapshot = self._member.notice.snapshot
        return snapshot.number > number and snapshot.phase == v1.Snapshot.SNAPSHOT

    async def _serve(self, snapshot: v1.Snapshot) -> None:
        vectors = self._holder.pieces()
        kept = [piece for place in snapshot.places for _, piece in vectors[place.vector]]
        needed_bytes = sum(piece.nbytes for piece in kept)
        free_bytes = free_memory_bytes()
        copies = free_bytes is None or free_bytes > ROOM * needed_bytes
        sums: list[int] = []
        elems = sum(map(len, kept))
        async with self._holder.still():
            versions = self._holder.versions()
            if copies:
                vectors = await self._copied(vectors, elems)
            else:
                sums = await self._write(snapshot, vectors, elems)
        self._say(snapshot, v1.SnapshotReport.HELD, versions=versions)
        await self._member.heard(lambda: not self._is(snapshot, v1.Snapshot.SNAPSHOT))
        if not self._is(snapshot, v1.Snapshot.WRITE):
            return
        if copies:
            sums = await self._write(snapshot, vectors, elems)
            vectors = {}
            trim()
        self._say(snapshot, v1.SnapshotReport.WRITTEN, sums=sums)

    def _is(self, snapshot: v1.Snapshot, phase: v1.Snapshot.Phase) -> bool:
        now = self._member.notice.snapshot
        return now.number == snapshot.number and now.phase == phase

    async def _copied(self, vectors: Mapping[str, Pieces], elems: int) -> Mapping[str, Pieces]:
        return await self._runtime.compute(
            lambda _: {name: [(at, one.clone()) for at, one in pieces] for name, pieces in vectors.items()},
            work=Work("snapshot", elems=elems),
            shape_only=vectors,
        )

    async def _write(self, snapshot: v1.Snapshot, vectors: Mapping[str, Pieces], elems: int) -> list[int]:
        storage = self._runtime.storage

        def write() -> list[int]:
            sums: list[int] = []
            for place in snapshot.places:
                storage.patch(place.path, _laid(vectors[place.vector], place.offset_bytes, sums))
            return sums

        return await self._runtime.beside(write, work=Work("write", elems=elems))

    def _say(
        self,
        snapshot: v1.Snapshot,
        kind: v1.SnapshotReport.Kind,
        *,
        versions: Sequence[int] = (),
        sums: Sequence[int] = (),
        error: str = "",
    ) -> None:
        report = v1.SnapshotReport(
            number=snapshot.number, kind=kind, versions=versions, sums=sums, error=error
        )
        self._member.report(report)


def _laid(pieces: Pieces, offset_bytes: int, sums: list[int]) -> Iterator[tuple[int, memoryview]]:
    """Each piece with its offset in a file; notes the CRC-32 of each."""
    for start, piece in pieces:
        data = piece.numpy().data.cast("B")
        sums.append(zlib.crc32(data))
        yield offset_bytes + start * piece.element_size(), data


def load(storage: Storage, folder: str, vectors: Mapping[str, Pieces]) -> None:
    """Fills pieces from a checkpoint whose hashes were verified.

    Args:
        vectors: as `SnapshotSource.pieces` gives them; written.

    Raises:
        DataError, OSError: a file is not there, or too short.
    """
    for name, pieces in vectors.items():
        path = f"{folder}/{file_of(name)}"
        offset_bytes = data_offset(storage, path)
        for start, piece in pieces:
            for first in range(0, len(piece), READ_ELEMS):
                part = piece[first : first + READ_ELEMS]
                offset = offset_bytes + (start + first) * part.element_size()
                data = storage.read_at(path, offset, part.nbytes)
                if len(data) != part.nbytes:
                    raise DataError(
                        f"{path} ends inside elements {start} to {start + len(piece)}: is it the checkpoint "
                        "of this model?"
                    )
                part.copy_(torch.frombuffer(bytearray(data), dtype=part.dtype))
