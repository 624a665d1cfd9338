"""A node's part in a snapshot: it writes its ranges of the vectors into the files of the checkpoint.

If there is enough memory, the node copies its ranges while the workers are paused, and writes the copy after
they have resumed. Otherwise it writes while they are paused. No update is applied during the pause: everything that
the workers have computed is in the model.
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
from gradstream.machine.resources import free_memory_bytes
from gradstream.memory import trim
from gradstream.runtime.base import Runtime, Storage, Work
from gradstream.wire import v1
from gradstream.wire.chunks import PartMap

# ---- snapshot ----------------------------------------------------------------------------

ROOM = 1.5
"""The node makes a copy if this many times its bytes are free."""

READ_ELEMS = 1 << 20
"""Elements that are read at once."""

Pieces = Sequence[tuple[int, torch.Tensor]]
"""The pieces of a vector that a node has: index of the first element in the vector, and the elements."""


class SnapshotSource(Protocol):
    """A node that has parts of the run's vectors: a shard, or a worker where there are no servers."""

    def pieces(self, holders: Sequence[str]) -> Mapping[str, Pieces]:
        """Returns the node's pieces of each vector, by name: "" for the parameters, else a state of the optimizer.

        Args:
            holders: names of all nodes that write this snapshot; this one is among them.
        """
        ...

    def versions(self, holders: Sequence[str]) -> Sequence[int]:
        """Returns the versions of the node's chunks."""
        ...

    def procedures(self, holders: Sequence[str]) -> Sequence[v1.Procedure]:
        """Returns the state of a procedure that the node's chunks have; empty if there is none."""
        ...

    def still(self) -> AbstractAsyncContextManager[object]:
        """Returns a context in which no piece changes."""
        ...


class SnapshotMember(Protocol):
    """The part of `gradstream.coordinator.Member` that a snapshot needs."""

    notice: v1.Notice

    async def heard(self, reached: Callable[[], bool]) -> None:
        """Waits until `reached()` holds; see `Member.heard`."""
        ...

    def report(self, report: v1.BeatReport) -> None:
        """Reports how far this node is with a snapshot."""
        ...


def unsplit(pieces: Pieces, place: PartMap) -> Pieces:
    """Converts pieces of a part's own vector to pieces of the unsplit one."""
    return [
        (at, piece[begin - start : stop - start])
        for start, piece in pieces
        for at, begin, stop in place.pieces(start, start + len(piece))
    ]


class NodeSnapshots:
    """Follows the snapshots of a run, one after the other.

    Args:
        member: gets the notices.
        source: has the pieces.
    """

    def __init__(self, runtime: Runtime, member: SnapshotMember, source: SnapshotSource) -> None:
        self._runtime = runtime
        self._member = member
        self._source = source

    async def run(self) -> None:
        """Takes part in every snapshot, until it is cancelled or the run is over."""
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
                report = v1.SnapshotReport(number=snapshot.number, kind=v1.SnapshotReport.FAILED, error=text)
                self._member.report(v1.BeatReport(snapshot=report))

    def _asked(self, number: int) -> bool:
        snapshot = self._member.notice.snapshot
        return snapshot.number > number and snapshot.stage == v1.Snapshot.SNAPSHOT

    async def _serve(self, snapshot: v1.Snapshot) -> None:
        holders = snapshot.holders
        if self._runtime.node not in holders:
            return
        vectors = self._source.pieces(holders)
        pieces = [piece for place in snapshot.places for _, piece in vectors[place.vector]]
        needed_bytes = sum(piece.nbytes for piece in pieces)
        free_bytes = free_memory_bytes()
        copies = free_bytes is None or free_bytes > ROOM * needed_bytes
        sums: list[int] = []
        elems = sum(map(len, pieces))
        async with self._source.still():
            versions, procedures = self._source.versions(holders), self._source.procedures(holders)
            if copies:
                vectors = await self._copied(vectors, elems)
            else:
                sums = await self._write(snapshot, vectors, elems)
        number = snapshot.number
        held = v1.SnapshotReport(
            number=number, kind=v1.SnapshotReport.HELD, versions=versions, procedures=procedures
        )
        self._member.report(v1.BeatReport(snapshot=held))
        await self._member.heard(lambda: not self._is(snapshot, v1.Snapshot.SNAPSHOT))
        if not self._is(snapshot, v1.Snapshot.WRITE):
            return
        if copies:
            sums = await self._write(snapshot, vectors, elems)
            vectors = {}
            trim(needed_bytes)
        written = v1.SnapshotReport(number=number, kind=v1.SnapshotReport.WRITTEN, sums=sums)
        self._member.report(v1.BeatReport(snapshot=written))

    def _is(self, snapshot: v1.Snapshot, stage: v1.Snapshot.Stage) -> bool:
        now = self._member.notice.snapshot
        return now.number == snapshot.number and now.stage == stage

    async def _copied(self, vectors: Mapping[str, Pieces], elems: int) -> Mapping[str, Pieces]:
        return await self._runtime.compute(
            lambda _: {
                name: [(at, piece.clone()) for at, piece in pieces] for name, pieces in vectors.items()
            },
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


def _laid(pieces: Pieces, offset_bytes: int, sums: list[int]) -> Iterator[tuple[int, memoryview]]:
    """Yields each piece with its offset in a file, and adds the CRC-32 of each to `sums`."""
    for start, piece in pieces:
        data = piece.numpy().data.cast("B")
        sums.append(zlib.crc32(data))
        yield offset_bytes + start * piece.element_size(), data


def load(storage: Storage, folder: str, vectors: Mapping[str, Pieces]) -> None:
    """Fills pieces from a checkpoint whose hashes were verified.

    Args:
        folder: folder of the checkpoint.
        vectors: pieces as `SnapshotSource.pieces` returns them; they are written.

    Raises:
        DataError, OSError: a file is missing or too short.
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


# ---- carried -----------------------------------------------------------------------------
# `Carried`: vectors that a worker of a group keeps in memory from one phase of its job to the next.
#
# A phase continues from the checkpoint with which the previous one ended. All workers of a group have everything in
# it, so none has to read over a link what the others have written: 86 MB took two minutes at 10 Mbit/s.


class Carried:
    """The vectors of the checkpoint that ended a phase, kept in this process; empty before, and after other phases.

    Attributes:
        boundary: number of the boundary at which they were kept (`JobPhase.boundary`): nothing else continues from
            them.
    """

    def __init__(self) -> None:
        self.boundary = -1
        self._version = -1
        self._vectors: dict[str, torch.Tensor] = {}

    def keep(self, version: int, vectors: Mapping[str, Pieces]) -> None:
        """Copies whole vectors, of one piece each, as the checkpoint of this version has them."""
        self._version = version
        self._vectors = {name: piece.clone() for name, ((_, piece),) in vectors.items()}

    def fill(self, version: int, vectors: Mapping[str, Pieces]) -> Mapping[str, Pieces]:
        """Fills pieces from the kept vectors of this version. Returns the others, which are still to be read."""
        left = dict(vectors)
        if version == self._version:
            for name in [name for name in vectors if name in self._vectors]:
                for start, piece in left.pop(name):
                    piece.copy_(self._vectors[name][start : start + len(piece)])
        return left

    def forget(self) -> None:
        """Frees the vectors."""
        self._version, self._vectors = -1, {}
