"""Checkpoints for nodes whose machine does not see the run directory: the coordinator has its disk.

The other side is `checkpoint/elsewhere.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from gradstream.checkpoint.elsewhere import PART_BYTES
from gradstream.coordinator.checkpoint_writer import CheckpointWriter
from gradstream.errors import RefusedError
from gradstream.runtime.base import Runtime, Work
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1

__all__ = ["CheckpointHandler", "lies_in"]

WRITE_BYTES = 8 << 20
"""So much is gathered before it is written, and made durable, at once."""


class CheckpointHandler:
    """Serves "keep" and "kept".

    Args:
        runtime: of the coordinator; its storage is the run directory.
        endpoint: of the coordinator.
        writer: knows the open drafts, and the checkpoint that the run goes on from.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, writer: CheckpointWriter) -> None:
        self._runtime = runtime
        self._name = endpoint.identity.name
        self._writer = writer
        endpoint.serve("keep", self._keep, model=False)
        endpoint.serve("kept", self._kept, model=False)

    async def _keep(self, stream: Stream) -> None:
        """Writes what a holder sends of its own ranges into an open draft."""
        path, who = v1.Keep.FromString(stream.opened.body).path, stream.opened.sender
        ranges, parts = self._writer.ranges_of(who, path), list[tuple[int, bytes]]()
        while (received := await stream.recv()) is not None:
            part = v1.Part.FromString(received.frame.body.data)
            if not lies_in(ranges, part):
                text = f"{who} may not write {len(part.data)} bytes at {part.offset_bytes} of {path[:200]!r}"
                raise RefusedError(self._name, "BAD_REQUEST", f"{text}: expected its own of an open draft")
            parts.append((part.offset_bytes, part.data))
            if sum(len(data) for _, data in parts) >= WRITE_BYTES:
                await self._write(path, parts)
                parts = []
        if parts:
            await self._write(path, parts)
        await stream.send(v1.Frame(body=v1.Body()))

    async def _write(self, path: str, parts: list[tuple[int, bytes]]) -> None:
        storage = self._runtime.storage
        try:
            await self._runtime.beside(lambda: storage.patch(path, parts), work=Work("write"))
        except OSError as error:
            raise RefusedError(self._name, "INTERNAL", f"{type(error).__name__}: {error}") from error

    async def _kept(self, stream: Stream) -> None:
        """Sends bytes of a file of the checkpoint that the run goes on from."""
        request, storage = v1.Kept.FromString(stream.opened.body), self._runtime.storage
        folder, _, name = request.path.rpartition("/")
        if folder != self._writer.resumed_from or not folder or name not in storage.names(folder):
            text = f"{request.path[:200]!r} is no file of the checkpoint that this run goes on from"
            raise RefusedError(self._name, "BAD_REQUEST", text)
        offset, end = request.offset_bytes, request.offset_bytes + request.size_bytes
        while offset < end:
            data = await self._read(request.path, offset, min(PART_BYTES, end - offset))
            if not data:
                return
            await stream.send(v1.Frame(body=v1.Body(data=data)))
            offset += len(data)

    async def _read(self, path: str, offset: int, size: int) -> bytes:
        storage = self._runtime.storage
        try:
            return await self._runtime.beside(lambda: storage.read_at(path, offset, size), work=Work("read"))
        except OSError as error:
            raise RefusedError(self._name, "INTERNAL", f"{type(error).__name__}: {error}") from error


def lies_in(ranges: Sequence[tuple[int, int]], part: v1.Part) -> bool:
    """Whether a part is inside one of some growing ranges of bytes, [start, stop)."""
    index = bisect_right(ranges, part.offset_bytes, key=lambda one: one[0]) - 1
    return index >= 0 and part.offset_bytes + len(part.data) <= ranges[index][1]
