"""`ElsewhereStorage`: the files of a node whose machine has no access to the run directory.

The node has its own files on its own disk. Checkpoints are in the run directory, so it reads and writes them
through the coordinator, by the methods "kept" and "keep". The code of shards and workers is the same:

    storage.patch("checkpoints/…", pieces)     Body(Part) frames ─▶ coordinator ─▶ its disk
    storage.read_at("checkpoints/…", …)        Body frames       ◀─ coordinator ◀─ its disk
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from gradstream.checkpoint.folder import FOLDER, Policy, prune, sweep, verify
from gradstream.checkpoint.manifest import MAX_BYTES, STATE, Manifest
from gradstream.errors import DataError, GradstreamError, RefusedError
from gradstream.runtime.base import Buffer, Runtime, Storage, Work
from gradstream.runtime.storage import DiskStorage
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1

PART_BYTES = 1 << 20
"""Bytes of a file in one frame."""

T = TypeVar("T")


class ElsewhereStorage(DiskStorage):
    """Implements `Storage`: checkpoints are on the coordinator's disk, all other files on this machine's.

    Methods block while they access files of a checkpoint: call them from threads beside the event loop. They raise
    OSError if the coordinator cannot be reached, or cannot read or write.

    Args:
        root: directory of the files on this machine.
        endpoint: endpoint of the node, started; it knows the coordinator.
        coordinator: name of the coordinator.
        silence_s: seconds of silence of the coordinator after which a method raises.
    """

    def __init__(self, root: Path, endpoint: Endpoint, coordinator: str, *, silence_s: float) -> None:
        super().__init__(root)
        self._endpoint = endpoint
        self._coordinator = coordinator
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._manifests: dict[str, Manifest] = {}  # by folder

    @override
    def read(self, path: str) -> bytes:
        if not _is_kept(path):
            return super().read(path)
        size_bytes = MAX_BYTES if path.endswith(f"/{STATE}") else self.size(path)
        return self.read_at(path, 0, size_bytes)

    @override
    def read_at(self, path: str, offset: int, size: int) -> bytes:
        if not _is_kept(path):
            return super().read_at(path, offset, size)
        return self._wait(self._read(v1.Kept(path=path, offset_bytes=offset, size_bytes=size)))

    def size(self, path: str) -> int:
        """See `Storage.size`. The size of a checkpoint's file is the one in its `state.json`."""
        if not _is_kept(path):
            return super().size(path)
        folder, _, name = path.rpartition("/")
        files = self._manifest(folder).files
        if name not in files:
            raise FileNotFoundError(path)
        return files[name].size_bytes

    @override
    def names(self, folder: str) -> list[str]:
        return sorted([STATE, *self._manifest(folder).files]) if _is_kept(folder) else super().names(folder)

    @override
    def patch(self, path: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
        if not _is_kept(path):
            super().patch(path, pieces)
            return
        stream = self._wait(self._endpoint.open(self._coordinator, "keep", v1.Keep(path=path)))
        try:
            for offset, piece in pieces:
                data = memoryview(piece).cast("B")
                for start in range(0, len(data), PART_BYTES):
                    part = v1.Part(offset_bytes=offset + start, data=bytes(data[start : start + PART_BYTES]))
                    frame = v1.Frame(body=v1.Body(data=part.SerializeToString()))
                    self._wait(stream.send(frame, silence_s=self._silence_s))
            self._wait(self._confirmed(stream))
        finally:
            self._loop.call_soon_threadsafe(stream.cancel, "done")

    def _manifest(self, folder: str) -> Manifest:
        if folder not in self._manifests:
            self._manifests[folder] = Manifest.decode(self.read(f"{folder}/{STATE}"))
        return self._manifests[folder]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the event loop, while this thread waits for its result."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except GradstreamError as error:
            raise OSError(f"checkpoints are on the coordinator's machine: {error}") from error

    async def _read(self, request: v1.Kept) -> bytes:
        stream = await self._endpoint.open(self._coordinator, "kept", request)
        parts, left_bytes = [], request.size_bytes
        try:
            await stream.end()
            while (received := await stream.recv(self._silence_s)) is not None:
                parts.append(received.frame.body.data)
                left_bytes -= len(parts[-1])
                if left_bytes < 0:
                    raise RefusedError(
                        self._coordinator,
                        "BAD_REQUEST",
                        f"{self._coordinator} sent more than the {request.size_bytes} bytes of {request.path} "
                        "that this node asked for",
                    )
        finally:
            stream.cancel("done")
        return b"".join(parts)

    async def _confirmed(self, stream: Stream) -> None:
        await stream.end()
        if await stream.recv(self._silence_s) is None:
            raise RefusedError(
                self._coordinator, "INTERNAL", "it did not confirm that the ranges are on its disk"
            )


def _is_kept(path: str) -> bool:
    return re.match(rf"{FOLDER}/\.?step-", path) is not None


# ---- copies ------------------------------------------------------------------------------
# Copies of checkpoints on a second machine, for the case that the first one is lost.
#
# The run directory is on the coordinator's machine. If there is a worker on another one, the coordinator sends it each
# checkpoint, file by file, by the method "copy"; the worker writes them to its own disk, compares them with their
# SHA-256, and keeps the newest ones. A copy is sent beside training, and takes at most a fifth of the link's time.

METHOD = "copy"

PAUSES = 4
"""Seconds of pause for each second of sending."""


_PATH = re.compile(rf"{FOLDER}/(step-\d{{8,}}(?:\.\d+)?)/([A-Za-z0-9_][A-Za-z0-9_.-]{{0,200}})")


async def send_copy(runtime: Runtime, endpoint: Endpoint, folder: str, worker: str, silence_s: float) -> int:
    """Sends a checkpoint to a worker, `state.json` last. Returns its bytes.

    Raises:
        OSError: a file cannot be read; the checkpoint may have been removed meanwhile.
        PeerLostError, DeadlineError: the worker is gone, or silent.
        RefusedError: the worker cannot write it, or has got something else.
    """
    storage, sent_bytes = runtime.storage, 0
    state = await _on_disk(runtime, lambda: storage.read(f"{folder}/{STATE}"), "read")
    for name in [*Manifest.decode(state).files, STATE]:
        path = f"{folder}/{name}"
        size_bytes = await _on_disk(runtime, partial(storage.size, path), "read")
        stream = await endpoint.open(worker, METHOD, v1.Keep(path=path))
        try:
            for offset in range(0, size_bytes, PART_BYTES):
                data = await _on_disk(runtime, partial(storage.read_at, path, offset, PART_BYTES), "read")
                begun_ns = runtime.now()
                part = v1.Part(offset_bytes=offset, data=data)
                await stream.send(v1.Frame(body=v1.Body(data=part.SerializeToString())), silence_s=silence_s)
                await runtime.sleep(PAUSES * (runtime.now() - begun_ns) / 1e9)
            await stream.end()
            while await stream.recv(silence_s) is not None:
                pass
        finally:
            stream.cancel("done")
        sent_bytes += size_bytes
    return sent_bytes


class CopyKeeper:
    """A worker's side: serves "copy".

    Args:
        runtime: runtime of the worker.
        endpoint: endpoint of the worker.
        storage: where the copies go: not the run's own storage, whose checkpoints are the coordinator's.
        policy: which copies are kept.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, storage: Storage, policy: Policy) -> None:
        self._runtime = runtime
        self._name = endpoint.identity.name
        self._storage = storage
        self._policy = policy
        endpoint.serve(METHOD, self._keep, model=False)

    async def _keep(self, stream: Stream) -> None:
        """Writes one file. With `state.json` the copy is complete, and gets its name."""
        path = v1.Keep.FromString(stream.opened.body).path
        match = _PATH.fullmatch(path)
        if match is None:
            raise RefusedError(self._name, "BAD_REQUEST", f"{path[:200]!r} is no file of a checkpoint")
        folder, name = match[1], match[2]
        draft = f"{FOLDER}/.{folder}.copy.tmp"
        await self._write(lambda: self._storage.mkdir(draft))
        await self._write(lambda: self._storage.remove(f"{draft}/{name}"))
        await self._write(lambda: self._storage.patch(f"{draft}/{name}", []))
        while (received := await stream.recv()) is not None:
            part = v1.Part.FromString(received.frame.body.data)
            await self._write(
                lambda part=part: self._storage.patch(f"{draft}/{name}", [(part.offset_bytes, part.data)])  # type: ignore[misc]
            )
        if name == STATE:
            await self._write(lambda: self._complete(draft, f"{FOLDER}/{folder}"))
        await stream.send(v1.Frame(body=v1.Body()))

    def _complete(self, draft: str, folder: str) -> None:
        storage = self._storage
        try:
            verify(storage, draft)
        except DataError:
            storage.remove(draft)
            raise
        storage.remove(folder)
        storage.rename(draft, folder)
        storage.sync(FOLDER)
        sweep(storage)
        prune(storage, self._policy, fresh=folder)

    async def _write(self, work: Callable[[], T]) -> T:
        try:
            return await _on_disk(self._runtime, work, "write")
        except (OSError, DataError) as error:
            raise RefusedError(self._name, "INTERNAL", f"{type(error).__name__}: {error}") from error


async def _on_disk(runtime: Runtime, work: Callable[[], T], kind: str) -> T:
    return await runtime.beside(work, work=Work(kind))
