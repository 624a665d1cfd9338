"""Generated gRPC stubs alone drive a shard, as a program in another language would."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gradstream.wire import v1_pb2 as v1
from shard_stub import (
    ELEMS,
    Stub,
    chunk,
    exchange,
    fetch,
    opening,
    push,
    with_shard,
)


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
def test_a_node_of_another_run_is_refused(changes: dict[str, Any], code: v1.Code) -> None:
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


def test_a_waiting_reader_is_told_which_nodes_it_waits_for() -> None:
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
