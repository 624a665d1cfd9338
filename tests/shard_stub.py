"""A shard that serves on loopback, and a caller of it by generated gRPC stubs."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc.aio

from gradstream.optim import SGD
from gradstream.runtime.real import RealRuntime
from gradstream.server.aggregation import EveryPush
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.service import ShardService
from gradstream.testing.pairs import SECRET
from gradstream.transport.base import Identity
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.wire import v1_pb2 as v1
from gradstream.wire import v1_pb2_grpc
from kit.bare import Bare, BareSession, open_session

FINGERPRINT = 77
ELEMS = 100  # two chunks: 64 and 36
CALLER = Bare(Identity("job", "worker-5", 9, FINGERPRINT, epoch=3, secret=SECRET), called="shard-0")


class Stub:
    """The generated stub, and the session that its streams belong to."""

    def __init__(self, channel: grpc.aio.Channel, session: BareSession) -> None:
        self._stub = v1_pb2_grpc.PeerStub(channel)  # type: ignore[no-untyped-call]
        self._session = session

    def Stream(self, *requests: Any) -> Any:
        """One more stream."""
        return self._stub.Stream(*requests, metadata=self._session.metadata())


Script = Callable[[Stub], Coroutine[Any, Any, None]]


def with_shard(script: Script, first: int = 5, **options: Any) -> None:
    """Runs a script against a shard, which takes initial parameters of ranks up to `first`."""

    async def main() -> None:
        runtime = RealRuntime("shard-0")
        endpoint = GrpcEndpoint(Identity("job", "shard-0", 1, epoch=3, secret=SECRET), runtime)
        usual: dict[str, Any] = {"rule": EveryPush(), "optimizer": SGD(lr=1.0), "silence_s": 0.2}
        config = ShardConfig(0, 1, **(usual | options))
        service = ShardService(runtime, endpoint, config)
        service.register(v1.ModelSpec(fingerprint=FINGERPRINT, elems=ELEMS, dtype=v1.FLOAT32, chunk_elems=64))
        service.inspection.first = first
        await endpoint.start()
        try:
            async with grpc.aio.insecure_channel(endpoint.address) as channel:
                await script(Stub(channel, await open_session(channel, CALLER)))
        finally:
            await endpoint.close()
            runtime.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def opening(method: str, body: Any, /, **changes: Any) -> v1.Frame:
    return CALLER.opening(changes.pop("method", method), body.SerializeToString(), **changes)


def chunk(index: int, values: list[float], sequence: int) -> v1.Frame:
    header = v1.Chunk(index=index, sequence=sequence, elems=len(values), dtype=v1.FLOAT32)
    return v1.Frame(chunk=header, payload=struct.pack(f"<{len(values)}f", *values))


async def exchange(stub: Stub, *frames: v1.Frame) -> list[v1.Frame]:
    """Sends frames and takes everything that comes until the shard has said everything."""

    async def requests() -> AsyncIterator[v1.Frame]:
        for frame in frames:
            yield frame

    answers = []
    async for answer in stub.Stream(requests()):
        answers.append(answer)
        if answer.WhichOneof("kind") in ("end", "refuse"):
            break
    return answers


async def push(stub: Stub, sequence: int, value: float, **request: Any) -> list[int]:
    answers = await exchange(
        stub,
        opening("push", v1.Push(sequence=sequence, lr=1.0, samples=1, **request)),
        chunk(1, [value] * 36, sequence),
        chunk(0, [value] * 64, sequence),
        v1.Frame(end=v1.End()),
    )
    bodies = [frame.body.data for frame in answers if frame.WhichOneof("kind") == "body"]
    results = [result for data in bodies for result in v1.PushResults.FromString(data).results]
    assert sorted(result.chunk for result in results) == [0, 1]
    return [result.outcome for result in results]


async def fetch(stub: Stub) -> tuple[list[float], set[int]]:
    answers = await exchange(stub, opening("fetch", v1.Fetch()), v1.Frame(end=v1.End()))
    values, versions = [0.0] * ELEMS, set()
    for frame in answers:
        if frame.WhichOneof("kind") == "chunk":
            start, count = 64 * frame.chunk.index, frame.chunk.elems
            values[start : start + count] = struct.unpack(f"<{count}f", frame.payload)
            versions.add(frame.chunk.version)
    return values, versions
