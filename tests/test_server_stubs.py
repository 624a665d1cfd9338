"""A shard driven by generated gRPC stubs alone: what any other language would do."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc.aio
import pytest

from gradstream.optim import SGD
from gradstream.runtime.real import RealRuntime
from gradstream.server.aggregation import EveryPush
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.service import ShardService
from gradstream.testing.bare import Bare, BareSession, open_session
from gradstream.testing.pairs import SECRET
from gradstream.transport.base import Identity
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.wire import v1_pb2 as v1
from gradstream.wire import v1_pb2_grpc

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


def with_shard(script: Script) -> None:
    async def main() -> None:
        runtime = RealRuntime("shard-0")
        endpoint = GrpcEndpoint(Identity("job", "shard-0", 1, epoch=3, secret=SECRET), runtime)
        config = ShardConfig(0, 1, EveryPush(), SGD(lr=1.0), silence_s=0.2)
        service = ShardService(runtime, endpoint, config)
        service.register(v1.ModelSpec(fingerprint=FINGERPRINT, elems=ELEMS, dtype=v1.FLOAT32, chunk_elems=64))
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


def test_assign_push_fetch_and_retry() -> None:
    async def script(stub: Stub) -> None:
        applied, duplicate = v1.PushResult.APPLIED, v1.PushResult.DUPLICATE
        assert await push(stub, 1, 10.0, command=v1.Push.ASSIGN) == [applied, applied]
        assert await fetch(stub) == ([10.0] * ELEMS, {0})
        assert await push(stub, 2, 0.5) == [applied, applied]
        assert await push(stub, 2, 0.5) == [duplicate, duplicate]
        assert await fetch(stub) == ([9.5] * ELEMS, {1})

    with_shard(script)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol": 2}, v1.BAD_PROTOCOL),
        ({"job": "another"}, v1.BAD_JOB),
        ({"fingerprint": 78}, v1.BAD_FINGERPRINT),
        ({"epoch": 2}, v1.STALE_EPOCH),
        ({"method": "kill"}, v1.UNKNOWN_METHOD),
    ],
)
def test_who_does_not_belong_is_refused(changes: dict[str, Any], code: v1.Code) -> None:
    async def script(stub: Stub) -> None:
        answers = await exchange(stub, opening("fetch", v1.Fetch(), **changes))
        assert [frame.WhichOneof("kind") for frame in answers] == ["refuse"]
        assert answers[0].refuse.code == code
        assert answers[0].refuse.message

    with_shard(script)


@pytest.mark.parametrize("values", [[1.0] * 63, [float("nan")] + [1.0] * 63, [float("inf")] * 64])
def test_chunk_that_does_not_fit_is_refused_and_changes_nothing(values: list[float]) -> None:
    async def script(stub: Stub) -> None:
        await push(stub, 1, 10.0, command=v1.Push.ASSIGN)
        request = opening("push", v1.Push(sequence=2, lr=1.0))
        answers = await exchange(stub, request, chunk(0, values, 2), v1.Frame(end=v1.End()))
        expected = v1.BAD_REQUEST if len(values) == 63 else v1.NON_FINITE
        assert answers[-1].refuse.code == expected
        assert await fetch(stub) == ([10.0] * ELEMS, {0})

    with_shard(script)


def test_who_must_wait_is_told_for_whom() -> None:
    async def script(stub: Stub) -> None:
        call = stub.Stream()
        await call.write(opening("fetch", v1.Fetch()))
        kinds = []
        while "waiting" not in kinds:
            frame = await call.read()
            kinds.append(frame.WhichOneof("kind"))
        assert list(frame.waiting.on) == ["the worker of the lowest rank (initial parameters)"]
        await push(stub, 1, 10.0, command=v1.Push.ASSIGN)
        while frame.WhichOneof("kind") != "end":
            frame = await call.read()
            kinds.append(frame.WhichOneof("kind"))
        assert kinds.count("chunk") == 2
        call.cancel()

    with_shard(script)


def test_chunks_are_sent_only_under_credit() -> None:
    async def script(stub: Stub) -> None:
        await push(stub, 1, 10.0, command=v1.Push.ASSIGN)
        call = stub.Stream()
        await call.write(opening("fetch", v1.Fetch(), window=1))
        seen: list[str | None] = []
        while not {"accept", "chunk"} <= set(seen):
            seen.append((await call.read()).WhichOneof("kind"))
        pending = asyncio.ensure_future(call.read())
        done, _ = await asyncio.wait([pending], timeout=0.05)
        assert not done, pending.result()
        await call.write(v1.Frame(credit=v1.Credit(frames=1)))
        assert (await pending).WhichOneof("kind") == "chunk"
        call.cancel()

    with_shard(script)
