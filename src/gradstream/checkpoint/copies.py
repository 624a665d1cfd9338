"""Copies of checkpoints on a second machine, for the case that the first one is lost.

The run directory is on the coordinator's machine. If there is a worker on another one, the coordinator sends it each
checkpoint, file by file, by the method "copy"; the worker writes them to its own disk, compares them with their
SHA-256, and keeps the newest ones. A copy is sent beside training, and takes at most a fifth of the link's time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gradstream.checkpoint.elsewhere import PART_BYTES
from gradstream.checkpoint.folder import FOLDER, prune, sweep, verify
from gradstream.checkpoint.manifest import STATE, Manifest
from gradstream.checkpoint.policy import Policy
from gradstream.errors import DataError, RefusedError
from gradstream.runtime.base import Runtime, Storage, Work
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1

METHOD = "copy"

PAUSES = 4
"""Seconds of pause for each second of sending."""

T = TypeVar("T")

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
