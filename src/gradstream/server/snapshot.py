"""A shard's part in a cut: it holds its ranges as they are, and writes them into the checkpoint's files.

Held means copied, where there is memory for a copy, and written while workers wait, where there is
not. Nothing is being applied then: every worker stands, with all its pushes acknowledged.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol

import torch

from gradstream.checkpoint.folder import data_offset, file_of
from gradstream.checkpoint.manifest import STATE, Manifest
from gradstream.errors import DataError, GradstreamError
from gradstream.memory import trim
from gradstream.runtime.base import Runtime, Storage, Work
from gradstream.runtime.resources import free_memory_bytes
from gradstream.server.chunks import ChunkMap
from gradstream.server.service import ShardService
from gradstream.wire import v1

__all__ = ["Snapshots", "restore"]

ROOM = 1.5
"""A copy is made where this much of its size is free."""

Vectors = Mapping[str, torch.Tensor]


class Member(Protocol):
    """What is needed of `gradstream.membership.Member`."""

    notice: v1.Notice

    async def heard(self, reached: Callable[[], bool]) -> None:
        """Waits until something holds that a notice decides."""
        ...

    def report(self, report: v1.CutReport) -> None:
        """Says how far this node is with a cut."""
        ...


class Snapshots:
    """Follows the cuts of a run, one after the other.

    Args:
        runtime: of the shard's node.
        member: tells of cuts.
        service: registered.
        rank: of the shard.
    """

    def __init__(self, runtime: Runtime, member: Member, service: ShardService, rank: int) -> None:
        self._runtime = runtime
        self._member = member
        self._service = service
        self._rank = rank

    async def run(self) -> None:
        """Serves every cut that comes, until it is cancelled or the run is over."""
        cut = v1.Cut()
        while True:
            await self._member.heard(partial(self._asked, cut.number))
            cut = v1.Cut()
            cut.CopyFrom(self._member.notice.cut)
            try:
                await self._serve(cut)
            except Exception as error:
                if isinstance(error, GradstreamError) and not isinstance(error, DataError):
                    raise  # the run is over
                text = f"{type(error).__name__}: {error}"
                self._say(cut, v1.CutReport.FAILED, error=text)

    def _asked(self, number: int) -> bool:
        cut = self._member.notice.cut
        return cut.number > number and cut.phase == v1.Cut.SNAPSHOT

    async def _serve(self, cut: v1.Cut) -> None:
        service = self._service
        vectors: Vectors = {"": service.store.parameters.tensor}
        vectors = {**vectors, **{name: vector.tensor for name, vector in service.store.state.items()}}
        kept = [vectors[place.vector] for place in cut.places]
        needed_bytes = sum(tensor.nbytes for tensor in kept)
        free_bytes = free_memory_bytes()
        copies = free_bytes is None or free_bytes > ROOM * needed_bytes
        sums: list[int] = []
        elems = sum(map(len, kept))
        async with AsyncExitStack() as turns:
            for chunk in service.state.chunks:  # against pushes of a worker that is lost and does not know
                await turns.enter_async_context(service.turn(chunk))
            versions = service.versions()
            if copies:
                vectors = await self._copied(vectors)
            else:
                sums = await self._write(cut, vectors, elems)
        self._say(cut, v1.CutReport.HELD, versions=versions)
        await self._member.heard(lambda: not self._is(cut, v1.Cut.SNAPSHOT))
        if not self._is(cut, v1.Cut.WRITE):
            return
        if copies:
            sums = await self._write(cut, vectors, elems)
            vectors = {}
            trim()
        self._say(cut, v1.CutReport.WRITTEN, sums=sums)

    def _is(self, cut: v1.Cut, phase: v1.Cut.Phase) -> bool:
        now = self._member.notice.cut
        return now.number == cut.number and now.phase == phase

    async def _copied(self, vectors: Vectors) -> Vectors:
        elems = sum(map(len, vectors.values()))
        return await self._runtime.compute(
            lambda _: {name: tensor.clone() for name, tensor in vectors.items()},
            work=Work("snapshot", elems=elems),
            phantom=vectors,
        )

    async def _write(self, cut: v1.Cut, vectors: Vectors, elems: int) -> list[int]:
        storage, chunks = self._runtime.storage, self._service.chunks

        def write() -> list[int]:
            sums: list[int] = []
            for place in cut.places:
                tensor = vectors[place.vector]
                storage.patch(place.path, _pieces(tensor, chunks, self._rank, place.offset_bytes, sums))
            return sums

        return await self._runtime.beside(write, work=Work("write", elems=elems))

    def _say(
        self,
        cut: v1.Cut,
        kind: v1.CutReport.Kind,
        *,
        versions: Sequence[int] = (),
        sums: Sequence[int] = (),
        error: str = "",
    ) -> None:
        report = v1.CutReport(number=cut.number, kind=kind, versions=versions, sums=sums, error=error)
        self._member.report(report)


def _pieces(
    tensor: torch.Tensor, chunks: ChunkMap, rank: int, offset_bytes: int, sums: list[int]
) -> Iterator[tuple[int, memoryview]]:
    """Each chunk of a shard's vector with its offset in a file; notes the CRC-32 of each."""
    for chunk in chunks.chunks_of(rank):
        first, end = chunks.local_bounds(chunk)
        piece = tensor[first:end].numpy().data.cast("B")
        sums.append(zlib.crc32(piece))
        yield offset_bytes + chunks.bounds(chunk)[0] * tensor.element_size(), piece


def restore(storage: Storage, folder: str, service: ShardService, rank: int) -> None:
    """Fills a registered shard's ranges, and the versions of its chunks, from a checkpoint.

    Args:
        folder: of the checkpoint, whose hashes were verified.

    Raises:
        DataError, OSError: a file is not there, or too short.
    """
    chunks, store = service.chunks, service.store
    versions = Manifest.decode(storage.read(f"{folder}/{STATE}")).versions
    for chunk, state in service.state.chunks.items():
        state.version = versions[chunk]
    for name, vector in {"": store.parameters, **store.state}.items():
        path = f"{folder}/{file_of(name)}"
        offset_bytes, itemsize = data_offset(storage, path), vector.tensor.element_size()
        for chunk in chunks.chunks_of(rank):
            start, stop = chunks.bounds(chunk)
            data = storage.read_at(path, offset_bytes + start * itemsize, (stop - start) * itemsize)
            if len(data) != (stop - start) * itemsize:
                raise DataError(f"{path} ends inside chunk {chunk}: is it the checkpoint of this model?")
            target = store.span(vector, chunk).tensor
            target.copy_(torch.frombuffer(bytearray(data), dtype=target.dtype))
