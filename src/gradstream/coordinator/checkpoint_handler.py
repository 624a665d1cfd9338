"""Checkpoint files for nodes on other machines, which do not see the run directory.

The nodes' side is `checkpoint/elsewhere.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from gradstream.checkpoint.elsewhere import PART_BYTES
from gradstream.coordinator.checkpoint_writer import CheckpointWriter
from gradstream.errors import RefusedError
from gradstream.runtime.base import Runtime, Work
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1

WRITE_BYTES = 8 << 20
"""Parts are gathered until they have so many bytes, and then written and made durable at once."""

T = TypeVar("T")


class CheckpointHandler:
    """Serves "keep", which writes, and "kept", which reads.

    Args:
        runtime: runtime of the coordinator; its storage is the run directory.
        endpoint: endpoint of the coordinator.
        writer: knows the open drafts, and the checkpoint that the run was resumed from.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, writer: CheckpointWriter) -> None:
        self._runtime = runtime
        self._name = endpoint.identity.name
        self._writer = writer
        endpoint.serve("keep", self._keep, model=False)
        endpoint.serve("kept", self._kept, model=False)

    async def _keep(self, stream: Stream) -> None:
        """Writes the ranges that a holder sends into an open draft."""
        path, who = v1.Keep.FromString(stream.opened.body).path, stream.opened.sender
        ranges, parts = self._writer.ranges_of(who, path), list[tuple[int, bytes]]()
        while (received := await stream.recv()) is not None:
            part = v1.Part.FromString(received.frame.body.data)
            if not lies_in(ranges, part):
                text = f"{who} may not write {len(part.data)} bytes at {part.offset_bytes} of {path[:200]!r}"
                raise RefusedError(
                    self._name,
                    "BAD_REQUEST",
                    f"{text}: expected a range of an open draft that {who} has to write",
                )
            parts.append((part.offset_bytes, part.data))
            if sum(len(data) for _, data in parts) >= WRITE_BYTES:
                await self._write(path, parts)
                parts = []
        if parts:
            await self._write(path, parts)
        await stream.send(v1.Frame(body=v1.Body()))

    async def _write(self, path: str, parts: list[tuple[int, bytes]]) -> None:
        await self._on_disk(lambda: self._runtime.storage.patch(path, parts), "write")

    async def _kept(self, stream: Stream) -> None:
        """Sends bytes of a file of the checkpoint that the run was resumed from."""
        request, storage = v1.Kept.FromString(stream.opened.body), self._runtime.storage
        path = request.path
        folder, _, name = path.rpartition("/")
        if folder != self._writer.resumed_from or not folder or name not in storage.names(folder):
            text = f"{path[:200]!r} is no file of the checkpoint that this run goes on from"
            raise RefusedError(self._name, "BAD_REQUEST", text)
        offset, end = request.offset_bytes, request.offset_bytes + request.size_bytes
        while offset < end:
            size = min(PART_BYTES, end - offset)
            data = await self._on_disk(partial(storage.read_at, path, offset, size), "read")
            if not data:
                return
            await stream.send(v1.Frame(body=v1.Body(data=data)))
            offset += len(data)

    async def _on_disk(self, work: Callable[[], T], kind: str) -> T:
        try:
            return await self._runtime.beside(work, work=Work(kind))
        except OSError as error:
            raise RefusedError(self._name, "INTERNAL", f"{type(error).__name__}: {error}") from error


def lies_in(ranges: Sequence[tuple[int, int]], part: v1.Part) -> bool:
    """Whether a part lies inside one of the ranges [start, stop) of bytes, which are in ascending order."""
    index = bisect_right(ranges, part.offset_bytes, key=lambda one: one[0]) - 1
    return index >= 0 and part.offset_bytes + len(part.data) <= ranges[index][1]
